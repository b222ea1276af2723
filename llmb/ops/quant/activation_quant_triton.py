"""Triton kernel that quantizes activations, and helpers for kernels that hold a whole row to be quantized."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.quant.activation_quant import GROUP, Activation, QuantFormat, as_activation, empty_activation

_E4M3_MAX = tl.constexpr(448.0)
_MIN_AMAX = tl.constexpr(2.0**-100)


@triton.jit
def store_activation_row(
    x, row, out_ptr, scales_ptr, C: tl.constexpr, BLOCK_C: tl.constexpr, QUANT_FORMAT: tl.constexpr
):
    """Store a row of C channels, padded to BLOCK_C, in any format."""
    c = tl.arange(0, BLOCK_C)
    if QUANT_FORMAT == "plain":
        tl.store(out_ptr + row * C + c, x, mask=c < C)
    elif QUANT_FORMAT == "per_token":
        _store_per_token(x.to(tl.float32), out_ptr + row * C, scales_ptr + row, c, c < C)
    else:
        _store_groups(x.to(tl.float32), out_ptr + row * C, scales_ptr + row * (C // 128), C, BLOCK_C)


@triton.jit
def _store_per_token(x, values_ptr, scale_ptr, c, mask):
    scale = tl.maximum(tl.max(tl.abs(x)), _MIN_AMAX) * (1 / _E4M3_MAX)
    tl.store(values_ptr + c, (x * (1.0 / scale)).to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr, scale)


@triton.jit
def _store_groups(x, values_ptr, scales_ptr, C: tl.constexpr, BLOCK_C: tl.constexpr):
    x = tl.reshape(x, (BLOCK_C // 128, 128))
    scales = tl.maximum(tl.max(tl.abs(x), 1), _MIN_AMAX) * (1 / _E4M3_MAX)
    groups = tl.arange(0, BLOCK_C // 128)
    c = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(values_ptr + c, (x * (1.0 / scales)[:, None]).to(tl.float8e4nv), mask=c < C)
    tl.store(scales_ptr + groups, scales, mask=groups * 128 < C)


@triton.jit
def _quantize_rows(
    x_ptr,
    x_stride,
    out_ptr,
    scales_ptr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    QUANT_FORMAT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    x = tl.load(x_ptr + row * x_stride + c, mask=c < C, other=0.0).to(tl.float32)
    store_activation_row(x, row, out_ptr, scales_ptr, C, BLOCK_C, QUANT_FORMAT)


def quantize_activation_triton(x_NC: Tensor, quant_format: QuantFormat) -> Activation:
    """Launch the kernel of `activation_quant.quantize_activation` for the fp8 formats; channels must be contiguous."""
    n, c = x_NC.shape
    out_NC, scales = empty_activation(n, c, quant_format, x_NC)
    block_c = max(triton.next_power_of_2(c), GROUP)
    if n:
        _quantize_rows[(n,)](
            x_NC, x_NC.stride(0), out_NC, scales,
            C=c, BLOCK_C=block_c, QUANT_FORMAT=quant_format, num_warps=min(max(block_c // 512, 1), 16),
            **pdl_options(n),
        )  # fmt: skip
    return as_activation(out_NC, scales, quant_format)
