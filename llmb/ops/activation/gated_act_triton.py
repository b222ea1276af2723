"""Triton kernel of the gated activation in serving: one program a token."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.activation.activation_triton import activation_value
from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.quant.activation_quant import GROUP, Activation, QuantFormat, as_activation, empty_activation
from llmb.ops.quant.activation_quant_triton import store_activation_row


@triton.jit
def _gated_activation(
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANT_FORMAT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    gated_activation_row(row, gate_up_ptr, out_ptr, scales_ptr, F, BLOCK_F, ACTIVATION, QUANT_FORMAT)


@triton.jit
def gated_activation_row(
    row,
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANT_FORMAT: tl.constexpr,
):
    """One row, for any kernel that knows which."""
    f = tl.arange(0, BLOCK_F)
    mask = f < F
    gate = tl.load(gate_up_ptr + row * 2 * F + f, mask=mask, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + f, mask=mask, other=0.0).to(tl.float32)
    act = (activation_value(gate, ACTIVATION).to(dtype).to(tl.float32) * up).to(dtype)
    store_activation_row(act, row, out_ptr, scales_ptr, F, BLOCK_F, QUANT_FORMAT)


def gated_activation_triton(gate_up_N2F: Tensor, activation: str, quant_format: QuantFormat) -> Activation:
    """Launch the kernel of `gated_act.gated_activation`."""
    n, f = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    out_NF, scales = empty_activation(n, f, quant_format, gate_up_N2F)
    block_f = max(triton.next_power_of_2(f), GROUP)
    if n:
        _gated_activation[(n,)](
            gate_up_N2F.contiguous(), out_NF, scales,
            F=f, BLOCK_F=block_f, ACTIVATION=activation, QUANT_FORMAT=quant_format,
            num_warps=min(max(block_f // 1024, 1), 16), **pdl_options(n),
        )  # fmt: skip
    return as_activation(out_NF, scales, quant_format)
