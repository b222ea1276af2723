"""Triton kernels of RMSNorm into fp8.

Rows alone take one program each, which reads its row once. Columns need tiles of many rows, none of which is a whole
row: a first kernel computes the inverse RMS of each row, and a second reads the rows again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.norm.rms_norm_triton import inverse_rms, load_row, warps_per_row
from llmb.ops.quant.fp8_quant import ScaleAmax
from llmb.ops.quant.fp8_quant_triton import (
    CHANNELS,
    QUADS,
    SCALARS,
    WARPS,
    amax_bits,
    as_words,
    is_e5m2,
    load_fourth,
    load_inverse_scale,
    row_stride,
    store_tile,
    tile_count,
    tile_origin,
    to_fp8,
    update_amax,
)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _rms_norm_fp8_row(
    x_ptr, weight_ptr, scale_ptr, amax_ptr, rows_ptr, x_stride, rows_stride, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_C)
    x = load_row(x_ptr, x_stride, C, BLOCK_C)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    normed = x * inverse_rms(x, eps, C) * weight
    update_amax(amax_ptr, tl.abs(normed))
    if ROWS:
        values = to_fp8(normed, load_inverse_scale(scale_ptr), E5M2)
        tl.store(rows_ptr + tl.program_id(0).to(tl.int64) * rows_stride + c, values, mask=c < C)


@triton.jit
def _inverse_rms(x_ptr, out_ptr, x_stride, eps, C: tl.constexpr, BLOCK_C: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0), inverse_rms(load_row(x_ptr, x_stride, C, BLOCK_C), eps, C))


@triton.jit
def _normed_fourth(
    x_ptr, weight, inverse_rms_ptr, x_stride, token, channel, n, K,
    FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    x = load_fourth(x_ptr, x_stride, token, channel, n, K, FOURTH, QUADS, CHANNELS)
    t = token + 4 * tl.arange(0, QUADS) + FOURTH
    inverse = tl.load(inverse_rms_ptr + t, mask=t < n, other=0.0)
    return x * inverse[:, None] * weight


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=SCALARS)
def _rms_norm_fp8_tile(
    x_ptr, weight_ptr, inverse_rms_ptr, scale_ptr, amax_ptr, rows_ptr, columns_ptr,
    x_stride, rows_stride, columns_stride, n, K,
    ROWS: tl.constexpr, E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel = tile_origin(K, QUADS, CHANNELS)
    c = channel + tl.arange(0, CHANNELS)
    weight = tl.load(weight_ptr + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
    x0 = _normed_fourth(x_ptr, weight, inverse_rms_ptr, x_stride, token, channel, n, K, 0, QUADS, CHANNELS)
    x1 = _normed_fourth(x_ptr, weight, inverse_rms_ptr, x_stride, token, channel, n, K, 1, QUADS, CHANNELS)
    x2 = _normed_fourth(x_ptr, weight, inverse_rms_ptr, x_stride, token, channel, n, K, 2, QUADS, CHANNELS)
    x3 = _normed_fourth(x_ptr, weight, inverse_rms_ptr, x_stride, token, channel, n, K, 3, QUADS, CHANNELS)
    store_tile(
        x0, x1, x2, x3, scale_ptr, amax_ptr, rows_ptr, columns_ptr, rows_stride, columns_stride, token, channel, n, K,
        ROWS, True, E5M2, QUADS, CHANNELS,
    )  # fmt: skip


def rms_norm_fp8_triton(
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    scale_amax: ScaleAmax,
    rows_NC: Tensor | None = None,
    columns_CP: Tensor | None = None,
) -> None:
    """Launch the kernels of `rms_norm_fp8.rms_norm_fp8`."""
    assert x_NC.stride(1) == 1, "channels must be contiguous"
    n, c = x_NC.shape
    if not n:
        return
    words, e5m2, amax = as_words(columns_CP, n), is_e5m2(rows_NC, columns_CP), amax_bits(scale_amax)
    block_c = triton.next_power_of_2(c)
    warps = warps_per_row(block_c)
    if words is None:
        _rms_norm_fp8_row[(n,)](
            x_NC, weight_C, scale_amax.scale, amax, rows_NC, x_NC.stride(0), row_stride(rows_NC), eps,
            C=c, BLOCK_C=block_c, ROWS=rows_NC is not None, E5M2=e5m2, num_warps=warps,
        )  # fmt: skip
        return
    inverse_rms_N = torch.empty(n, dtype=torch.float32, device=x_NC.device)
    _inverse_rms[(n,)](x_NC, inverse_rms_N, x_NC.stride(0), eps, C=c, BLOCK_C=block_c, num_warps=warps)
    _rms_norm_fp8_tile[(tile_count(n, c, QUADS, CHANNELS),)](
        x_NC, weight_C, inverse_rms_N, scale_amax.scale, amax, rows_NC, words,
        x_NC.stride(0), row_stride(rows_NC), words.stride(0), n, c,
        ROWS=rows_NC is not None, E5M2=e5m2, QUADS=QUADS, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
