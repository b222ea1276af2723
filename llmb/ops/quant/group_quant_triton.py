"""Triton kernels that quantize the rows of groups: one finds the largest magnitudes, one writes both layouts.

No tile has rows of two groups. A tile of the second kernel is held as four, as in `fp8_quant_triton.py`, for the same
reason. Both read the rows once: 4 bytes a number in bf16, and each layout writes 1 more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.quant.delayed_scaling import reduce_amax
from llmb.ops.quant.fp8_quant_triton import (
    CHANNELS,
    QUADS,
    WARPS,
    invert,
    load_tile,
    magnitude_bits,
    pack_fp8,
    store_fourth,
    to_fp8,
)
from llmb.ops.quant.group_quant import TILE, AmaxReductions, GroupedFp8, GroupOffsets, amax_to_scale_

AMAX_CHANNELS, AMAX_WARPS = 64, 8  # of a tile of the first kernel, which transposes nothing


@triton.jit
def _tile(ptr, T, K, CHANNELS: tl.constexpr):
    """Pointer to this program's tile in the table, and its first channel. Programs of a tile are consecutive."""
    tiles_per_row = tl.cdiv(K, CHANNELS)
    program = tl.program_id(0)
    return ptr + program // tiles_per_row, program % tiles_per_row * CHANNELS


@triton.jit(do_not_specialize=["T"])
def _group_amax(
    x_ptr, tiles_ptr, row_ptr, column_ptr, x_stride, T, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Magnitudes as integers of the same bits, which have the same order, NaN last."""
    tile_ptr, channel = _tile(tiles_ptr, T, K, CHANNELS)
    group, first, end = tl.load(tile_ptr), tl.load(tile_ptr + T), tl.load(tile_ptr + 2 * T)
    if first < end:
        t, k = tl.arange(0, TILE), tl.arange(0, CHANNELS)
        row_mask, channel_mask = first + t < end, channel + k < K
        pointers = x_ptr + (first * x_stride + channel) + (t[:, None] * x_stride + k[None, :])
        x = tl.load(pointers, mask=row_mask[:, None] & channel_mask[None, :], other=0.0).to(tl.float32)
        bits = magnitude_bits(x)
        if ROWS:
            tl.atomic_max(row_ptr + first + t, tl.max(bits, 1), mask=row_mask, sem="relaxed")
        if COLUMNS:
            tl.atomic_max(
                column_ptr + group * K + channel + k, tl.max(bits, 0), mask=channel_mask, sem="relaxed"
            )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _quantize_groups(
    x_ptr, tiles_ptr, row_scales_ptr, column_scales_ptr, rows_ptr, words_ptr, x_stride, rows_stride, quad_words, T, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    tile_ptr, channel = _tile(tiles_ptr, T, K, CHANNELS)
    group, first, end = tl.load(tile_ptr), tl.load(tile_ptr + T), tl.load(tile_ptr + 2 * T)
    column, last_column = tl.load(tile_ptr + 3 * T), tl.load(tile_ptr + 4 * T)
    if column < last_column:
        x0, x1, x2, x3 = load_tile(x_ptr, x_stride, first, channel, end, K, QUADS, CHANNELS)
        if ROWS:
            scales_ptr, base, left = row_scales_ptr + first, rows_ptr + (first * rows_stride + channel), end - first
            _store_rows(x0, scales_ptr, base, rows_stride, left, K - channel, 0, QUADS, CHANNELS)
            _store_rows(x1, scales_ptr, base, rows_stride, left, K - channel, 1, QUADS, CHANNELS)
            _store_rows(x2, scales_ptr, base, rows_stride, left, K - channel, 2, QUADS, CHANNELS)
            _store_rows(x3, scales_ptr, base, rows_stride, left, K - channel, 3, QUADS, CHANNELS)
        if COLUMNS:
            k, quad = tl.arange(0, CHANNELS), tl.arange(0, QUADS)
            scales = tl.load(column_scales_ptr + group * K + channel + k, mask=channel + k < K, other=1.0)
            words = pack_fp8(x0, x1, x2, x3, invert(scales)[None, :], False)
            # Groups start at multiples of 16 columns, or 4 words, and so do rows: with that hint, stores take 16 bytes.
            word, last = tl.multiple_of(column // 4, 4), tl.multiple_of(last_column // 4, 4)
            base = words_ptr + (word + channel.to(tl.int64) * (4 * quad_words))
            mask = (channel + k < K)[:, None] & (quad < last - word)[None, :]
            tl.store(base + (k[:, None] * (4 * quad_words) + quad[None, :]), tl.trans(words), mask=mask)


@triton.jit
def _store_rows(
    x, scales_ptr, base, stride, rows_left, channels_left,
    FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Every fourth row, from this one on, divided by its own scale."""
    t = 4 * tl.arange(0, QUADS) + FOURTH
    inverse = invert(tl.load(scales_ptr + t, mask=t < rows_left, other=1.0))[:, None]
    store_fourth(to_fp8(x, inverse, False), base, stride, rows_left, channels_left, FOURTH, QUADS, CHANNELS)


def quantize_groups_triton_(
    x_NK: Tensor, groups: GroupOffsets, out: GroupedFp8, reductions: AmaxReductions = (None, None)
) -> None:
    """Launch the kernels of `group_quant.quantize_groups_`."""
    x_NK = x_NK.contiguous()  # the gradient of a sum has strides of zero
    (_, k), tiles = x_NK.shape, groups.tiles_5T.shape[1]
    rows, columns = out.rows is not None, out.columns is not None
    amax = [None if scales is None else scales.zero_() for scales in (out.row_scales, out.column_scales)]
    bits = [None if x is None else x.view(torch.int32) for x in amax]
    _group_amax[(tiles * triton.cdiv(k, AMAX_CHANNELS),)](
        x_NK, groups.tiles_5T, *bits, x_NK.stride(0), tiles, k,
        ROWS=rows, COLUMNS=columns, TILE=TILE, CHANNELS=AMAX_CHANNELS, num_warps=AMAX_WARPS,
    )  # fmt: skip
    for x, reduce_max in zip(amax, reductions, strict=True):
        if x is not None:
            reduce_amax(x, reduce_max)
    scales = [None if x is None else amax_to_scale_(x) for x in amax]
    words = None if out.columns is None else out.columns.view(torch.int32)
    _quantize_groups[(tiles * triton.cdiv(k, CHANNELS),)](
        x_NK, groups.tiles_5T, *scales, out.rows, words,
        x_NK.stride(0), k, 0 if words is None else words.shape[-1] // 4, tiles, k,
        ROWS=rows, COLUMNS=columns, QUADS=QUADS, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
