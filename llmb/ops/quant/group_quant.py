"""Rows of groups in 8 bits, in both forms that grouped products take, with scales as fine as those products allow.

    groups = groups_of(ends_E, rows)            # nothing is read on the host
    made = in_groups(x_NK, groups, rows=True, columns=True)

`rows` lie as they came, with a scale each: products over channels take groups of any size. `columns` are summed over
the rows of a group, so each group begins at a multiple of 16 there, zeros fill it up, and each of its channels has a
scale. A group has 16 places at least, because torch's kernel takes no sum over nothing. How many places there are is
known from the number of rows alone.

All is e4m3: torch's grouped product takes nothing else. A number is off by 1/16 of itself at most where it is no
smaller than 2**-14 of the largest in its row (or its column of the group); the reach of e5m2, which one scale a tensor
would need for gradients, is not missed. A row or column with an infinity or a NaN becomes NaN wholly.

A weight [E, O, I] is E groups of O rows, whose columns lie apart, [E, I, O]. `WeightForms` keeps both forms of one that
stays, made once until it changes.

Shapes: N rows, K channels, E groups, P places of columns, T tiles of up to 128 rows, each of one group.
"""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton
from llmb.ops.gemm.fp8_linear import MULTIPLE
from llmb.ops.quant.activation_quant import E4M3, LARGEST, SMALLEST_AMAX

TILE = 128  # rows


class Groups(NamedTuple):
    """Where groups are, all on the device."""

    ends_E: Tensor  # int32: the row after each group's last
    places_E: Tensor  # int32: the place after its last in columns
    tiles_5T: Tensor  # int64: group, first row, row after the group's last; the latter two as places


class GroupForms(NamedTuple):
    """Rows of groups in e4m3; a form that nobody asked for is None, and so are its scales."""

    rows: Tensor | None  # [N, K]
    row_scales: Tensor | None  # [N] fp32
    columns: Tensor | None  # [K, P]; of a weight [E, I, O]
    column_scales: Tensor | None  # [E, K] fp32


def places_of(rows: int, groups: int) -> int:
    """Room that suffices however many rows each group has."""
    return -(-rows // MULTIPLE) * MULTIPLE + groups * MULTIPLE


def groups_of(ends_E: Tensor, rows: int) -> Groups:
    """Of rows whose groups end there; tiles beyond the last are empty."""
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    padded_E = ((sizes_E + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE).clamp(min=MULTIPLE)
    places_E, tiles_E = padded_E.cumsum(0, dtype=torch.int32), (padded_E + (TILE - 1)) // TILE
    tile_ends_E = tiles_E.cumsum(0)
    tile_T = torch.arange(rows // TILE + len(ends_E), device=ends_E.device)
    group_T = torch.searchsorted(tile_ends_E, tile_T, right=True).clamp(max=len(ends_E) - 1)
    offset_T = (tile_T - (tile_ends_E - tiles_E)[group_T]) * TILE
    tiles = (
        group_T,
        (ends_E - sizes_E)[group_T] + offset_T,
        ends_E[group_T],
        (places_E - padded_E)[group_T] + offset_T,
        places_E[group_T],
    )
    return Groups(ends_E, places_E, torch.stack([part.to(torch.int64) for part in tiles]))


def matrices_of(weight_EOI: Tensor) -> Groups:
    """Of a weight's matrices, whose columns lie one matrix behind the other."""
    return _matrices_of(*weight_EOI.shape, weight_EOI.device)


@cache
def _matrices_of(e: int, o: int, i: int, device: torch.device) -> Groups:
    ends_E = torch.arange(1, e + 1, dtype=torch.int32, device=device) * o
    groups = groups_of(ends_E, e * o)
    groups.tiles_5T[3:] += groups.tiles_5T[0] * (o * (i - 1))
    return groups


def in_groups(x_NK: Tensor, groups: Groups, *, rows: bool = False, columns: bool = False) -> GroupForms:
    """Rows in the forms asked for, with the scales that fit them."""
    (n, k), e = x_NK.shape, len(groups.ends_E)
    made = _room(x_NK, (n, k) if rows else None, (k, places_of(n, e)) if columns else None, (e, k))
    cast_groups(x_NK, groups, made)
    return made


def weight_in_groups(weight_EOI: Tensor, *, rows: bool = False, columns: bool = False) -> GroupForms:
    """The same of a weight's matrices."""
    made = _weight_room(weight_EOI, rows=rows, columns=columns)
    cast_groups(weight_EOI.flatten(0, 1), matrices_of(weight_EOI), made)
    return made


class WeightForms:
    """Both forms of a weight that stays where it is: 2 bytes a number, in the same memory for good."""

    def __init__(self) -> None:
        self._made: GroupForms | None = None
        self._of: tuple[int, int] | None = None  # where the weight was, and its version

    @torch.no_grad()
    def of(self, weight_EOI: Tensor, dtype: torch.dtype, anew: bool = False) -> GroupForms:
        """Cast if the weight has changed since, or in any case: a CUDA graph must hold the cast for later replays.

        `dtype`: what it is rounded to first, as where weights are kept so, or come so from other ranks.
        """
        found = weight_EOI.data_ptr(), weight_EOI._version
        if self._made is None:
            self._made = _weight_room(weight_EOI, rows=True, columns=True)
        if anew or found != self._of:
            cast_groups(weight_EOI.to(dtype).flatten(0, 1), matrices_of(weight_EOI), self._made)
            self._of = found
        return self._made


def _weight_room(weight_EOI: Tensor, *, rows: bool, columns: bool) -> GroupForms:
    e, o, i = weight_EOI.shape
    return _room(weight_EOI, (e * o, i) if rows else None, (e, i, o) if columns else None, (e, i))


def _room(
    like: Tensor, rows: tuple[int, ...] | None, columns: tuple[int, ...] | None, scales: tuple[int, int]
) -> GroupForms:
    def empty(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor | None:
        return None if shape is None else torch.empty(shape, dtype=dtype, device=like.device)

    return GroupForms(
        empty(rows, E4M3),
        empty(rows and rows[:1], torch.float32),
        empty(columns, E4M3),
        empty(columns and scales, torch.float32),
    )


def cast_groups(x_NK: Tensor, groups: Groups, made: GroupForms) -> None:
    """Rows into the forms that there is room for."""
    if takes_triton(x_NK):
        from llmb.ops.quant.group_quant_triton import cast_groups_triton

        cast_groups_triton(x_NK, groups, made)
    else:
        cast_groups_reference(x_NK, groups, made)


def cast_groups_reference(x_NK: Tensor, groups: Groups, made: GroupForms) -> None:
    """The same in plain torch."""
    if made.rows is not None and made.row_scales is not None:
        made.row_scales.copy_(to_scales(x_NK.float().abs().amax(1)))
        made.rows.copy_(_eight_bits(x_NK, made.row_scales[:, None]))
    if made.columns is None or made.column_scales is None:
        return
    for group, (start, end) in enumerate(pairwise([0, *groups.ends_E.tolist()])):
        none = x_NK.new_zeros(1, x_NK.shape[1])  # what a group without rows has
        largest_K = torch.cat((x_NK[start:end], none)).float().abs().amax(0)
        made.column_scales[group] = to_scales(largest_K)
    flat, stride = made.columns.view(-1), made.columns.shape[-1]
    for group, first, end, place, stop in groups.tiles_5T.T.tolist():
        if place < stop:
            values = _eight_bits(x_NK[first : min(end, first + TILE)], made.column_scales[group])
            tile = flat.as_strided((x_NK.shape[1], min(stop - place, TILE)), (stride, 1), place)
            tile[:, : len(values)] = values.T
            tile[:, len(values) :] = 0


def to_scales(largest: Tensor) -> Tensor:
    """What is divided by where these are the largest magnitudes, in their place. NaN stays NaN.

    A product, not a quotient: CUDA divides by a number by way of its inverse, and a CPU must give the same bits.
    """
    return largest.clamp_(min=SMALLEST_AMAX).mul_(1 / LARGEST)


def _eight_bits(x: Tensor, scales: Tensor) -> Tensor:
    return (x.float() * scales.reciprocal()).clamp(-LARGEST, LARGEST).to(E4M3)
