"""Triton kernel of the residual add with RMSNorm: one program a token."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.norm.rms_norm_triton import inverse_rms
from llmb.ops.quant.activation_quant import Activation, QuantFormat, as_activation, empty_activation
from llmb.ops.quant.activation_quant_triton import store_activation_row


@triton.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    eps,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    QUANT_FORMAT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    mask = c < C
    weight = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + row * C + c, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if HAS_RESIDUAL:
        x = (x + tl.load(residual_ptr + row * C + c, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_ptr + row * C + c, x, mask=mask)
        x = x.to(tl.float32)
    normed = (x * inverse_rms(x, eps, C) * weight).to(dtype)
    store_activation_row(normed, row, out_ptr, scales_ptr, C, BLOCK_C, QUANT_FORMAT)


def add_rms_norm_triton(
    x_NC: Tensor, residual_NC: Tensor | None, weight_C: Tensor, eps: float, quant_format: QuantFormat
) -> tuple[Activation, Tensor]:
    """Launch the kernel of `add_rms_norm.add_rms_norm`; the sum is written over `residual_NC`."""
    n, c = x_NC.shape
    x_NC = x_NC.contiguous()
    out_NC, scales = empty_activation(n, c, quant_format, x_NC)
    total_NC = x_NC if residual_NC is None else residual_NC
    block_c = triton.next_power_of_2(c)
    if n:
        _add_rms_norm[(n,)](
            x_NC, total_NC, weight_C, out_NC, scales, eps,
            C=c, BLOCK_C=block_c, HAS_RESIDUAL=residual_NC is not None, QUANT_FORMAT=quant_format,
            num_warps=min(max(block_c // 512, 1), 16), **pdl_options(n),
        )  # fmt: skip
    return as_activation(out_NC, scales, quant_format), total_NC
