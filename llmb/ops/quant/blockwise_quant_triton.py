"""Triton kernel that quantizes a matrix in tiles of 128 x 128, which hold whole groups in either direction.

A tile is held as four, as in `fp8_quant_triton.py`, for the same reason. It is read once: 2 bytes a number in bf16, and
each layout writes 1 more. The layouts of a weight, whose scales are the same, are written by two launches: one that
rounds for both would meet the bug of ptxas that is described there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.quant.activation_quant import GROUP
from llmb.ops.quant.fp8_quant_triton import (
    invert,
    load_tile,
    magnitude_bits,
    max_nan,
    pack_fp8,
    store_fourth,
    tile_count,
    tile_origin,
    to_fp8,
)
from llmb.ops.quant.scaled_fp8 import ScaledFp8

QUADS, WARPS = GROUP // 4, 8
_E4M3_MAX = tl.constexpr(448.0)
_MIN_AMAX = tl.constexpr(2.0**-100)


@triton.jit
def _scale(bits):
    amax = bits.to(tl.float32, bitcast=True)
    return max_nan(amax, tl.full(amax.shape, _MIN_AMAX, tl.float32)) * (1 / _E4M3_MAX)


@triton.jit
def _channel_bits(x0, x1, x2, x3):
    """The largest magnitude of each channel of a tile."""
    low = tl.maximum(tl.max(magnitude_bits(x0), 0), tl.max(magnitude_bits(x1), 0))
    return tl.maximum(low, tl.maximum(tl.max(magnitude_bits(x2), 0), tl.max(magnitude_bits(x3), 0)))


@triton.jit
def _store_row_groups(
    x, rows_base, scales_base, stride, rows_left, channels_left,
    FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Every fourth row, from this one on, and its scales."""
    t = 4 * tl.arange(0, QUADS) + FOURTH
    scales = _scale(tl.max(magnitude_bits(x), 1))
    tl.store(scales_base + t, scales, mask=t < rows_left)
    values = to_fp8(x, invert(scales)[:, None], False)
    store_fourth(values, rows_base, stride, rows_left, channels_left, FOURTH, QUADS, CHANNELS)


@triton.jit
def _store_columns(x0, x1, x2, x3, inverse, base, stride, QUADS: tl.constexpr, CHANNELS: tl.constexpr):
    """A tile, transposed, in words of four tokens; the padded tokens of the last one are zeros."""
    words = pack_fp8(x0, x1, x2, x3, inverse, False)
    k, quad = tl.arange(0, CHANNELS)[:, None], tl.arange(0, QUADS)[None, :]
    tl.store(base + (k * stride + quad), tl.trans(words))


@triton.jit(do_not_specialize=["n"])
def _quantize_groups_of_128(
    x_ptr, rows_ptr, row_scales_ptr, words_ptr, column_scales_ptr, x_stride, rows_stride, row_group_stride,
    words_stride, column_group_stride, n, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel = tile_origin(K, QUADS, CHANNELS)
    x0, x1, x2, x3 = load_tile(x_ptr, x_stride, token, channel, n, K, QUADS, CHANNELS)
    if ROWS:
        base = rows_ptr + (token.to(tl.int64) * rows_stride + channel)
        scales = row_scales_ptr + (channel // CHANNELS).to(tl.int64) * row_group_stride + token
        _store_row_groups(x0, base, scales, rows_stride, n - token, K - channel, 0, QUADS, CHANNELS)
        _store_row_groups(x1, base, scales, rows_stride, n - token, K - channel, 1, QUADS, CHANNELS)
        _store_row_groups(x2, base, scales, rows_stride, n - token, K - channel, 2, QUADS, CHANNELS)
        _store_row_groups(x3, base, scales, rows_stride, n - token, K - channel, 3, QUADS, CHANNELS)
    if COLUMNS:
        scales_K = _scale(_channel_bits(x0, x1, x2, x3))
        group = (token // (4 * QUADS)).to(tl.int64) * column_group_stride
        tl.store(column_scales_ptr + group + channel + tl.arange(0, CHANNELS), scales_K)
        base = words_ptr + (channel.to(tl.int64) * words_stride + token // 4)
        _store_columns(x0, x1, x2, x3, invert(scales_K)[None, :], base, words_stride, QUADS, CHANNELS)


@triton.jit(do_not_specialize=["n"])
def _quantize_blocks_of_128(
    x_ptr, out_ptr, scales_ptr, x_stride, out_stride, scales_stride, n, K,
    TRANSPOSED: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel = tile_origin(K, QUADS, CHANNELS)
    x0, x1, x2, x3 = load_tile(x_ptr, x_stride, token, channel, n, K, QUADS, CHANNELS)
    scale = _scale(tl.max(_channel_bits(x0, x1, x2, x3), 0))
    row, column = token // (4 * QUADS), channel // CHANNELS
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    if TRANSPOSED:
        tl.store(scales_ptr + column * scales_stride + row, scale)
        base = out_ptr + (channel.to(tl.int64) * out_stride + token // 4)
        _store_columns(x0, x1, x2, x3, inverse, base, out_stride, QUADS, CHANNELS)
    else:
        tl.store(scales_ptr + row * scales_stride + column, scale)
        base = out_ptr + (token.to(tl.int64) * out_stride + channel)
        store_fourth(to_fp8(x0, inverse, False), base, out_stride, n - token, K - channel, 0, QUADS, CHANNELS)
        store_fourth(to_fp8(x1, inverse, False), base, out_stride, n - token, K - channel, 1, QUADS, CHANNELS)
        store_fourth(to_fp8(x2, inverse, False), base, out_stride, n - token, K - channel, 2, QUADS, CHANNELS)
        store_fourth(to_fp8(x3, inverse, False), base, out_stride, n - token, K - channel, 3, QUADS, CHANNELS)


def quantize_blockwise_triton_(x_NK: Tensor, out: ScaledFp8, square: bool = False) -> None:
    """Launch the kernels of `blockwise_quant.quantize_blockwise_`."""
    assert x_NK.stride(1) == 1, "channels must be contiguous"
    n, k = x_NK.shape
    if not n:
        return
    grid = (tile_count(n, k, QUADS, GROUP),)
    rows, columns = bool(out.rows.numel()), bool(out.columns.numel())
    words = out.columns.view(torch.int32)
    if not square:
        _quantize_groups_of_128[grid](
            x_NK, out.rows, out.row_scales, words, out.column_scales, x_NK.stride(0),
            out.rows.stride(0), out.row_scales.stride(-1), words.stride(0), out.column_scales.stride(-1), n, k,
            ROWS=rows, COLUMNS=columns, QUADS=QUADS, CHANNELS=GROUP, num_warps=WARPS,
        )  # fmt: skip
        return
    layouts = ((out.rows, out.row_scales, rows, False), (words, out.column_scales, columns, True))
    for values, scales, requested, transposed in layouts:
        if requested:
            _quantize_blocks_of_128[grid](
                x_NK, values, scales, x_NK.stride(0), values.stride(0), scales.stride(0), n, k,
                TRANSPOSED=transposed, QUADS=QUADS, CHANNELS=GROUP, num_warps=WARPS,
            )  # fmt: skip
