"""Quantization to fp8 of the rows of groups (the tokens of experts), in both layouts that grouped GEMMs take.

    groups = group_offsets(ends_E, rows)        # without synchronizing with the host
    x8 = quantize_groups(x_NK, groups, rows=True, columns=True)

`rows` have a scale each: GEMMs over channels take groups of any size. `columns` are reduced over the rows of a group,
so each group starts at a multiple of 16 there, padded with zeros, and each of its channels has a scale. A group has at
least 16 columns, because torch's kernel takes no reduction over nothing. The number of columns is known from the number
of rows alone.

All is e4m3, the only format of torch's grouped GEMM. A number is off by at most 1/16 of itself if it is no smaller than
2**-14 of the largest in its row (or its column of the group), so that gradients do not need the range of e5m2, as they
do with one scale per tensor. A row or column with an infinity or a NaN becomes NaN entirely.

A whole matrix is one group (`quantize_rowwise_`). Where ranks share its rows or columns, `reductions` give them the
scales of one process.

A weight [E, O, I] is E groups of O rows, whose columns are separate, [E, I, O]. `Fp8WeightCache` holds both layouts
until the weight changes.

Shapes: N rows, K channels, E groups, P padded columns, T tiles of up to 128 rows, each of one group.
"""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import E4M3, E4M3_MAX, MIN_AMAX
from llmb.ops.quant.delayed_scaling import ReduceMax, reduce_amax
from llmb.ops.quant.fp8_quant import FP8_ALIGNMENT
from llmb.ops.quant.scaled_fp8 import ScaledFp8

TILE = 128  # rows
AmaxReductions = tuple[ReduceMax | None, ReduceMax | None]  # of rows and of columns, over ranks that share them


class GroupOffsets(NamedTuple):
    """Boundaries of groups, all on the device."""

    ends_E: Tensor  # int32: the row after each group's last
    padded_ends_E: Tensor  # int32: the padded column after its last
    tiles_5T: Tensor  # int64: group, first row, row after the group's last; the latter two as padded columns


class GroupedFp8(NamedTuple):
    """Rows of groups in e4m3; a layout that was not requested is None, and so are its scales."""

    rows: Tensor | None  # [N, K]
    row_scales: Tensor | None  # [N] fp32
    columns: Tensor | None  # [K, P]; of a weight [E, I, O]
    column_scales: Tensor | None  # [E, K] fp32


def padded_columns(rows: int, groups: int) -> int:
    """Return the columns that suffice however the rows are distributed over groups."""
    return -(-rows // FP8_ALIGNMENT) * FP8_ALIGNMENT + groups * FP8_ALIGNMENT


def group_offsets(ends_E: Tensor, rows: int) -> GroupOffsets:
    """Return the boundaries of groups that end at these rows; tiles beyond the last are empty."""
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    padded_E = ((sizes_E + (FP8_ALIGNMENT - 1)) // FP8_ALIGNMENT * FP8_ALIGNMENT).clamp(min=FP8_ALIGNMENT)
    padded_ends_E, tiles_E = padded_E.cumsum(0, dtype=torch.int32), (padded_E + (TILE - 1)) // TILE
    tile_ends_E = tiles_E.cumsum(0)
    tile_T = torch.arange(rows // TILE + len(ends_E), device=ends_E.device)
    group_T = torch.searchsorted(tile_ends_E, tile_T, right=True).clamp(max=len(ends_E) - 1)
    offset_T = (tile_T - (tile_ends_E - tiles_E)[group_T]) * TILE
    tiles = (
        group_T,
        (ends_E - sizes_E)[group_T] + offset_T,
        ends_E[group_T],
        (padded_ends_E - padded_E)[group_T] + offset_T,
        padded_ends_E[group_T],
    )
    return GroupOffsets(ends_E, padded_ends_E, torch.stack([row_T.to(torch.int64) for row_T in tiles]))


def weight_group_offsets(weight_EOI: Tensor) -> GroupOffsets:
    """Return the boundaries of a weight's matrices, whose columns follow one another matrix by matrix."""
    return _weight_group_offsets(*weight_EOI.shape, weight_EOI.device)


@cache
def _weight_group_offsets(e: int, o: int, i: int, device: torch.device) -> GroupOffsets:
    ends_E = torch.arange(1, e + 1, dtype=torch.int32, device=device) * o
    groups = group_offsets(ends_E, e * o)
    groups.tiles_5T[3:] += groups.tiles_5T[0] * (o * (i - 1))
    return groups


def quantize_rowwise_(x_NK: Tensor, out: ScaledFp8, reductions: AmaxReductions = (None, None)) -> None:
    """Quantize a matrix, one group, to the layouts that `out` has: a scale per token, and per channel."""
    columns = out.columns if out.columns.numel() else None
    grouped = GroupedFp8(
        out.rows if out.rows.numel() else None,
        out.row_scales[:, 0] if out.rows.numel() else None,
        columns,
        None if columns is None else out.column_scales.T,
    )
    quantize_groups_(x_NK, _weight_group_offsets(1, *x_NK.shape, x_NK.device), grouped, reductions)


def quantize_groups(x_NK: Tensor, groups: GroupOffsets, *, rows: bool = False, columns: bool = False) -> GroupedFp8:
    """Quantize rows to the requested layouts, with scales from their own amax."""
    (n, k), e = x_NK.shape, len(groups.ends_E)
    out = _empty_grouped(x_NK, (n, k) if rows else None, (k, padded_columns(n, e)) if columns else None, (e, k))
    quantize_groups_(x_NK, groups, out)
    return out


def quantize_expert_weights(weight_EOI: Tensor, *, rows: bool = False, columns: bool = False) -> GroupedFp8:
    """Quantize a weight's matrices to the requested layouts."""
    out = _empty_weights(weight_EOI, rows=rows, columns=columns)
    quantize_groups_(weight_EOI.flatten(0, 1), weight_group_offsets(weight_EOI), out)
    return out


class Fp8WeightCache:
    """Both fp8 layouts of a persistent weight: 2 bytes a parameter, always in the same memory."""

    def __init__(self) -> None:
        self._quantized: GroupedFp8 | None = None
        self._source: tuple[int, int] | None = None  # address and version of the weight

    @torch.no_grad()
    def get(self, weight_EOI: Tensor, dtype: torch.dtype, force: bool = False) -> GroupedFp8:
        """Return the quantized weight, quantizing it again if it has changed, or with `force`, as CUDA graphs need.

        `dtype`: what it is rounded to first, as where weights are stored or all-gathered in that dtype.
        """
        source = weight_EOI.data_ptr(), weight_EOI._version
        if self._quantized is None:
            self._quantized = _empty_weights(weight_EOI, rows=True, columns=True)
        if force or source != self._source:
            quantize_groups_(weight_EOI.to(dtype).flatten(0, 1), weight_group_offsets(weight_EOI), self._quantized)
            self._source = source
        return self._quantized


def _empty_weights(weight_EOI: Tensor, *, rows: bool, columns: bool) -> GroupedFp8:
    e, o, i = weight_EOI.shape
    return _empty_grouped(weight_EOI, (e * o, i) if rows else None, (e, i, o) if columns else None, (e, i))


def _empty_grouped(
    like: Tensor, rows: tuple[int, ...] | None, columns: tuple[int, ...] | None, scales: tuple[int, int]
) -> GroupedFp8:
    def empty(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor | None:
        return None if shape is None else torch.empty(shape, dtype=dtype, device=like.device)

    return GroupedFp8(
        empty(rows, E4M3),
        empty(rows and rows[:1], torch.float32),
        empty(columns, E4M3),
        empty(columns and scales, torch.float32),
    )


@op
def quantize_groups_(
    x_NK: Tensor, groups: GroupOffsets, out: GroupedFp8, reductions: AmaxReductions = (None, None)
) -> None:
    """Quantize rows to the layouts that `out` has; `reductions` are those of amaxes of rows and of columns."""
    if out.rows is not None and out.row_scales is not None:
        amax_N = x_NK.float().abs().amax(1)
        reduce_amax(amax_N, reductions[0])
        out.row_scales.copy_(amax_to_scale_(amax_N))
        out.rows.copy_(_to_e4m3(x_NK, out.row_scales[:, None]))
    if out.columns is None or out.column_scales is None:
        return
    for group, (start, end) in enumerate(pairwise([0, *groups.ends_E.tolist()])):
        zero = x_NK.new_zeros(1, x_NK.shape[1])  # the row of a group without rows
        amax_K = torch.cat((x_NK[start:end], zero)).float().abs().amax(0)
        reduce_amax(amax_K, reductions[1])
        out.column_scales[group] = amax_to_scale_(amax_K)
    flat, stride = out.columns.view(-1), out.columns.shape[-1]
    for group, first, end, column, last in groups.tiles_5T.T.tolist():
        if column < last:
            values = _to_e4m3(x_NK[first : min(end, first + TILE)], out.column_scales[group])
            tile = flat.as_strided((x_NK.shape[1], min(last - column, TILE)), (stride, 1), column)
            tile[:, : len(values)] = values.T
            tile[:, len(values) :] = 0


def amax_to_scale_(amax: Tensor) -> Tensor:
    """Replace largest magnitudes by the scales to divide by. NaN stays NaN.

    A multiplication: CUDA divides by a constant through its inverse, and a CPU must give the same bits.
    """
    return amax.clamp_(min=MIN_AMAX).mul_(1 / E4M3_MAX)


def _to_e4m3(x: Tensor, scales: Tensor) -> Tensor:
    return (x.float() * scales.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
