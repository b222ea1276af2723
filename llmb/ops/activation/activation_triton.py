"""Activation functions for all kernels, and the Triton kernels of an MLP's activation.

In training one program takes one block of a row; tensors that are contiguous as a whole are one row. In serving, where
the row is quantized, one program takes all of it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.activation.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, empty_gradients
from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.quant.activation_quant import GROUP, Activation, QuantFormat, as_activation, empty_activation
from llmb.ops.quant.activation_quant_triton import store_activation_row
from llmb.ops.tensor_layout import as_rows

BLOCK, WARPS = 2048, 4  # 16 elements a thread of each tensor: two loads of 16 bytes in bf16
ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def activation_value(x, ACTIVATION: tl.constexpr):
    """silu, gelu (tanh approximation), squared_relu or the gate of swigluoai of x."""
    value, _ = activation_and_grad(x, 1.0, ACTIVATION)
    return value


@triton.jit
def activation_and_grad(x, dy, ACTIVATION: tl.constexpr):
    """The activation of x, and dy times its derivative."""
    if ACTIVATION == "silu":
        return silu_and_grad(x, dy, tl.sigmoid(x))
    elif ACTIVATION == "gelu":  # tanh(y) = 2 * sigmoid(2 y) - 1
        sigmoid = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        saturated = (sigmoid == 0) | (sigmoid == 1)  # where the cube may be infinite
        bend = sigmoid * (1 - sigmoid) * 1.5957691216057308 * x * (1 + 0.134145 * x * x)
        return x * sigmoid, dy * (sigmoid + tl.where(saturated, 0.0, bend))
    elif ACTIVATION == "swigluoai":
        gate = tl.where(x > LIMIT, LIMIT, x)  # NaN stays NaN
        sigmoid = tl.sigmoid(ALPHA * gate)
        grad = dy * sigmoid * (1 + ALPHA * gate * (1 - sigmoid))
        return gate * sigmoid, tl.where(x > LIMIT, 0.0, grad)
    else:
        relu = tl.maximum(x, 0.0)
        relu = tl.where(x == x, relu, x)  # NaN stays NaN
        return relu * relu, dy * (2 * relu)


@triton.jit
def gate_factor(up, ACTIVATION: tl.constexpr):
    """Return the factor of the activation: up, clamped and with 1 added in swigluoai."""
    if ACTIVATION == "swigluoai":
        clamped = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return clamped + 1
    else:
        return up


@triton.jit
def silu_and_grad(x, dy, sigmoid):
    """silu(x), and dy times its derivative; `sigmoid` is that of x."""
    return x * sigmoid, dy * sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def _row_and_channels(ROW_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Row and channels of this program. Programs of one row are consecutive, as memory is."""
    program = tl.program_id(0)
    if ROW_BLOCKS is None:  # all is one row, of any length
        return tl.zeros((), tl.int64), program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        return (program // ROW_BLOCKS).to(tl.int64), program % ROW_BLOCKS * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _activation(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, out_stride, F,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, ROW_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, f = _row_and_channels(ROW_BLOCKS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + f, mask=f < F, other=0.0).to(tl.float32)
    act = activation_value(gate, ACTIVATION)
    if GATED:
        up = tl.load(up_ptr + row * up_stride + f, mask=f < F, other=0.0).to(tl.float32)
        act *= gate_factor(up, ACTIVATION)
    tl.store(out_ptr + row * out_stride + f, act.to(out_ptr.dtype.element_ty), mask=f < F)


@triton.jit
def _activation_backward(
    dact_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    dact_stride, gate_stride, up_stride, dgate_stride, dup_stride, F,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, RECOMPUTE: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, f = _row_and_channels(ROW_BLOCKS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + f, mask=f < F, other=0.0).to(tl.float32)
    dact = tl.load(dact_ptr + row * dact_stride + f, mask=f < F, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(up_ptr + row * up_stride + f, mask=f < F, other=0.0).to(tl.float32)
        factor = gate_factor(up, ACTIVATION)
        act, dgate = activation_and_grad(gate, dact * factor, ACTIVATION)
        dup = dact * act
        if ACTIVATION == "swigluoai":
            dup = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, dup)
        tl.store(dup_ptr + row * dup_stride + f, dup.to(dup_ptr.dtype.element_ty), mask=f < F)
        act *= factor
    else:
        act, dgate = activation_and_grad(gate, dact, ACTIVATION)
    tl.store(dgate_ptr + row * dgate_stride + f, dgate.to(dgate_ptr.dtype.element_ty), mask=f < F)
    if RECOMPUTE:
        tl.store(dact_ptr + row * dact_stride + f, act.to(dact_ptr.dtype.element_ty), mask=f < F)


@triton.jit
def _gated_activation(
    gate_up_ptr, out_ptr, scales_ptr,
    F: tl.constexpr, BLOCK_F: tl.constexpr, ACTIVATION: tl.constexpr, QUANT_FORMAT: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    gated_activation_row(row, gate_up_ptr, out_ptr, scales_ptr, F, BLOCK_F, ACTIVATION, QUANT_FORMAT)


@triton.jit
def gated_activation_row(
    row, gate_up_ptr, out_ptr, scales_ptr,
    F: tl.constexpr, BLOCK_F: tl.constexpr, ACTIVATION: tl.constexpr, QUANT_FORMAT: tl.constexpr,
):  # fmt: skip
    """One row, for any kernel that knows which."""
    f = tl.arange(0, BLOCK_F)
    mask = f < F
    gate = tl.load(gate_up_ptr + row * 2 * F + f, mask=mask, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + f, mask=mask, other=0.0).to(tl.float32)
    act = activation_value(gate, ACTIVATION)
    if ACTIVATION != "swigluoai":  # else it is rounded once
        act = act.to(dtype).to(tl.float32)
    act = (act * gate_factor(up, ACTIVATION)).to(dtype)
    store_activation_row(act, row, out_ptr, scales_ptr, F, BLOCK_F, QUANT_FORMAT)


def activation_forward_triton(gate: Tensor, activation: str, up: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Launch the kernel of `activation.activation_forward`."""
    act = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if out is None else out
    assert act.stride(-1) == 1, "channels must be contiguous"
    if act.numel():
        programs, arguments, row_blocks = _launch_arguments(gate, gate if up is None else up, act)
        _activation[(programs,)](
            *arguments, ACTIVATION=activation, GATED=up is not None, ROW_BLOCKS=row_blocks, BLOCK=BLOCK, num_warps=WARPS
        )  # fmt: skip
    return act


def activation_backward_triton(
    dact: Tensor,
    gate: Tensor,
    activation: str,
    up: Tensor | None,
    out: tuple[Tensor, Tensor | None] | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel of `activation.activation_backward`."""
    dgate, dup = empty_gradients(gate, up) if out is None else out
    written = (dgate, dgate if dup is None else dup, dact if recompute else dgate)
    assert all(x.stride(-1) == 1 for x in written), "channels must be contiguous"
    if dact.numel():
        programs, arguments, row_blocks = _launch_arguments(
            dact, gate, gate if up is None else up, dgate, dgate if dup is None else dup
        )
        _activation_backward[(programs,)](
            *arguments, ACTIVATION=activation, GATED=up is not None, RECOMPUTE=recompute, ROW_BLOCKS=row_blocks,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return dgate, dup


def _launch_arguments(*tensors: Tensor) -> tuple[int, tuple[Any, ...], int | None]:
    """Return the number of programs, the arguments (tensors, row strides, channels), and the blocks of a row.

    Tensors that are all contiguous are one row, which leaves no block of a short row half empty.
    """
    if all(x.is_contiguous() for x in tensors):
        rows, row_blocks = [x.view(1, -1) for x in tensors], None
    else:
        rows, row_blocks = [as_rows(x) for x in tensors], triton.cdiv(tensors[0].shape[-1], BLOCK)
    n, f = rows[0].shape
    return n * triton.cdiv(f, BLOCK), (*rows, *(x.stride(0) for x in rows), f), row_blocks


def gated_activation_triton(gate_up_N2F: Tensor, activation: str, quant_format: QuantFormat) -> Activation:
    """Launch the kernel of `activation.gated_activation`."""
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
