"""Triton for rows of groups in 8 bits: a pass that finds the largest magnitudes, and one that writes both forms.

No tile has rows of two groups. A tile of the second pass is held as four, as in `fp8_quant_triton.py`, and for the same
reason. Both read the rows once: of bf16 that is 4 bytes a number, and each form takes 1 more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.quant.fp8_quant_triton import (
    CHANNELS,
    QUADS,
    WARPS,
    eight_bits,
    load_fourth,
    packed,
    store_fourth,
)
from llmb.ops.quant.group_quant import TILE, GroupForms, Groups, to_scales

LOOK_CHANNELS, LOOK_WARPS = 64, 8  # of a tile of the first pass, which transposes nothing


@triton.jit
def _tile(ptr, T, K, CHANNELS: tl.constexpr):
    """Where this program's tile stands in the table, and its first channel. Programs of a tile follow one another."""
    across = tl.cdiv(K, CHANNELS)
    program = tl.program_id(0)
    return ptr + program // across, program % across * CHANNELS


@triton.jit(do_not_specialize=["T"])
def _largest(
    x_ptr, tiles_ptr, row_ptr, column_ptr, x_row, T, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Magnitudes as integers of the same bits: these have the same order, NaN at its end."""
    tile_ptr, channel = _tile(tiles_ptr, T, K, CHANNELS)
    group, first, end = tl.load(tile_ptr), tl.load(tile_ptr + T), tl.load(tile_ptr + 2 * T)
    if first < end:
        t, k = tl.arange(0, TILE), tl.arange(0, CHANNELS)
        there, inside = first + t < end, channel + k < K
        places = x_ptr + (first * x_row + channel) + (t[:, None] * x_row + k[None, :])
        x = tl.load(places, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if ROWS:
            tl.atomic_max(row_ptr + first + t, tl.max(bits, 1), mask=there, sem="relaxed")
        if COLUMNS:
            cells = column_ptr + group * K + channel + k
            tl.atomic_max(cells, tl.max(bits, 0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["T"])
def _cast(
    x_ptr, tiles_ptr, row_scales_ptr, column_scales_ptr, rows_ptr, words_ptr, x_row, rows_row, words_fours, T, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    tile_ptr, channel = _tile(tiles_ptr, T, K, CHANNELS)
    group, first, end = tl.load(tile_ptr), tl.load(tile_ptr + T), tl.load(tile_ptr + 2 * T)
    place, stop = tl.load(tile_ptr + 3 * T), tl.load(tile_ptr + 4 * T)
    if place < stop:
        x0 = load_fourth(x_ptr, x_row, first, channel, end, K, 0, QUADS, CHANNELS)
        x1 = load_fourth(x_ptr, x_row, first, channel, end, K, 1, QUADS, CHANNELS)
        x2 = load_fourth(x_ptr, x_row, first, channel, end, K, 2, QUADS, CHANNELS)
        x3 = load_fourth(x_ptr, x_row, first, channel, end, K, 3, QUADS, CHANNELS)
        if ROWS:
            scales_ptr, base, left = row_scales_ptr + first, rows_ptr + (first * rows_row + channel), end - first
            _store_rows(x0, scales_ptr, base, rows_row, left, K - channel, 0, QUADS, CHANNELS)
            _store_rows(x1, scales_ptr, base, rows_row, left, K - channel, 1, QUADS, CHANNELS)
            _store_rows(x2, scales_ptr, base, rows_row, left, K - channel, 2, QUADS, CHANNELS)
            _store_rows(x3, scales_ptr, base, rows_row, left, K - channel, 3, QUADS, CHANNELS)
        if COLUMNS:
            k, quad = tl.arange(0, CHANNELS), tl.arange(0, QUADS)
            scales = tl.load(column_scales_ptr + group * K + channel + k, mask=channel + k < K, other=1.0)
            words = packed(x0, x1, x2, x3, _inverse(scales)[None, :], False)
            # Groups begin at multiples of 16 places, or 4 words, and so do rows: known, words are stored four by four.
            word, last = tl.multiple_of(place // 4, 4), tl.multiple_of(stop // 4, 4)
            base = words_ptr + (word + channel.to(tl.int64) * (4 * words_fours))
            inside = (channel + k < K)[:, None] & (quad < last - word)[None, :]
            tl.store(base + (k[:, None] * (4 * words_fours) + quad[None, :]), tl.trans(words), mask=inside)


@triton.jit
def _store_rows(
    x, scales_ptr, base, stride, rows_left, channels_left,
    FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Every fourth row, from this one on, divided by its own scale."""
    t = 4 * tl.arange(0, QUADS) + FOURTH
    inverse = _inverse(tl.load(scales_ptr + t, mask=t < rows_left, other=1.0))[:, None]
    store_fourth(eight_bits(x, inverse, False), base, stride, rows_left, channels_left, FOURTH, QUADS, CHANNELS)


@triton.jit
def _inverse(scales):
    return tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)


def cast_groups_triton(x_NK: Tensor, groups: Groups, made: GroupForms) -> None:
    """As `fp8_group_forms.cast_groups_reference`."""
    x_NK = x_NK.contiguous()  # the gradient of a sum comes without strides
    (_, k), tiles = x_NK.shape, groups.tiles_5T.shape[1]
    rows, columns = made.rows is not None, made.columns is not None
    largest = [None if scales is None else scales.zero_() for scales in (made.row_scales, made.column_scales)]
    bits = [None if found is None else found.view(torch.int32) for found in largest]
    _largest[(tiles * triton.cdiv(k, LOOK_CHANNELS),)](
        x_NK, groups.tiles_5T, *bits, x_NK.stride(0), tiles, k,
        ROWS=rows, COLUMNS=columns, TILE=TILE, CHANNELS=LOOK_CHANNELS, num_warps=LOOK_WARPS,
    )  # fmt: skip
    scales = [None if found is None else to_scales(found) for found in largest]
    words = None if made.columns is None else made.columns.view(torch.int32)
    _cast[(tiles * triton.cdiv(k, CHANNELS),)](
        x_NK, groups.tiles_5T, *scales, made.rows, words,
        x_NK.stride(0), k, 0 if words is None else words.shape[-1] // 4, tiles, k,
        ROWS=rows, COLUMNS=columns, QUADS=QUADS, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
