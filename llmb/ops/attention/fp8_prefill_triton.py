"""Triton kernels around cuDNN's fp8 attention: q, k and v into e4m3, the output out of it; one program a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.fp8_prefill import OUTPUT_MAX
from llmb.ops.quant.activation_quant import E4M3, MIN_AMAX

WARPS = 8


@triton.jit
def _quantize_qkv(
    qkv_ptr, out_ptr, amax_ptr, stride, tokens, padded, inv_key_scale, inv_value_scale,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K and V are the first columns of keys and of values."""
    row, prompt = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < W
    x = tl.load(qkv_ptr + (prompt * tokens + row) * stride + column, mask=mask & (row < tokens), other=0.0)
    x = x.to(tl.float32)
    factor = tl.where(column < K, 1.0, tl.where(column < V, inv_key_scale, inv_value_scale))
    tl.store(out_ptr + (prompt * padded + row) * W + column, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)
    if row < tokens:
        tl.atomic_max(amax_ptr, tl.max(tl.where(column >= V, tl.abs(x), 0.0)), sem="relaxed")


@triton.jit
def _dequantize_output(
    out_ptr, amax_ptr, result_ptr, tokens, padded, inv_output_max, X: tl.constexpr, BLOCK: tl.constexpr
):
    row, prompt = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(out_ptr + (prompt * padded + row) * X + column, mask=column < X, other=0.0).to(tl.float32)
    x = x * (tl.load(amax_ptr) * inv_output_max)
    tl.store(result_ptr + (prompt * tokens + row) * X + column, x.to(result_ptr.dtype.element_ty), mask=column < X)


def quantize_qkv_triton(
    qkv_NW: Tensor, batch: int, padded: int, kv_heads: int, head_dim: int, key_scale: float, value_scale: float
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of `fp8_prefill.quantize_qkv`; rows may have any stride."""
    assert qkv_NW.stride(1) == 1, "a token's projections must be contiguous"
    width, kv_width = qkv_NW.shape[1], kv_heads * head_dim
    out_BSW = torch.empty(batch, padded, width, dtype=E4M3, device=qkv_NW.device)
    amax_1 = torch.full((1,), MIN_AMAX, device=qkv_NW.device)
    _quantize_qkv[padded, batch](
        qkv_NW, out_BSW, amax_1, qkv_NW.stride(0), len(qkv_NW) // batch, padded, 1 / key_scale, 1 / value_scale,
        K=width - 2 * kv_width, V=width - kv_width, W=width, BLOCK=triton.next_power_of_2(width), num_warps=WARPS,
    )  # fmt: skip
    return out_BSW, amax_1


def dequantize_output_triton(out_BSX: Tensor, amax_1: Tensor, tokens: int, out_NHD: Tensor) -> None:
    """Launch the kernel of `fp8_prefill.dequantize_output`."""
    batch, padded, width = out_BSX.shape
    assert out_NHD.is_contiguous(), "rows are written side by side"
    _dequantize_output[tokens, batch](
        out_BSX, amax_1, out_NHD, tokens, padded, 1 / OUTPUT_MAX, X=width, BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS,
    )  # fmt: skip
