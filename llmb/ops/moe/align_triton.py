"""Visits dealt into tiles in Triton: every expert's are put together and filled up to whole tiles of rows.

How many tiles are in use only the device knows. The host takes the most that so many visits can need, so that a graph
can be captured; those that are nobody's come last. Nothing is counted with atomics: an expert's visits stay in order.

Shapes: N tokens, K visits a token, M = N * K, E experts of this rank, T tiles, P = T * rows of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import begins, dependent

CHUNK = 1024  # visits that a program looks at in one go


class Tile(NamedTuple):
    """How much of a product one program computes at a time, and on what of a multiprocessor."""

    columns: int  # for the form groups8 no more than 128, which share a scale
    depth: int  # for the form groups8 128, which share a scale
    warps: int
    stages: int
    band: int  # tiles of rows that are taken before the next columns, so that weights are read while still cached


@triton.jit(do_not_specialize=["first", "visits"])
def _count_kernel(chosen, counts, first, visits, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):
    begins(DEPENDENT)
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, visits, CHUNK):
        visit = start + tl.arange(0, CHUNK)
        found += (tl.load(chosen + visit, mask=visit < visits, other=-1) == first + expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


@triton.jit(do_not_specialize=["first", "visits", "experts", "tiles"])
def _deal_kernel(
    chosen, counts, visits_of, expert_of, first, visits, experts, tiles,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for each expert, and one more for the tiles that are nobody's."""
    begins(DEPENDENT)
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    tiles_of = tl.cdiv(tl.load(counts + every, mask=every < experts, other=0), ROWS)
    start_tile = tl.sum(tl.where(every < expert, tiles_of, 0))
    own_tiles = tl.sum(tl.where(every == expert, tiles_of, 0))
    end_tile = tl.where(expert < experts, start_tile + own_tiles, tiles)
    name = tl.where(expert < experts, expert, -1)
    if expert < experts:
        place = start_tile * ROWS
        for start in range(0, visits, CHUNK):
            visit = start + tl.arange(0, CHUNK)
            mine = tl.load(chosen + visit, mask=visit < visits, other=-1) == first + expert
            number = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(visits_of + place + number - 1, visit, mask=mine)
            place += tl.sum(mine.to(tl.int32))
        padding = place + tl.arange(0, ROWS)
        tl.store(visits_of + padding, tl.full((ROWS,), visits, tl.int32), mask=padding < end_tile * ROWS)
    for start in range(start_tile, end_tile, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        tl.store(expert_of + tile, tl.zeros((CHUNK,), tl.int32) + name, mask=tile < end_tile)


@triton.jit
def tile_and_block(tiles, outputs, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """Which tile of rows and which block of columns a program computes."""
    across = tl.cdiv(outputs, COLUMNS)
    band, within = tl.program_id(0) // (BAND * across), tl.program_id(0) % (BAND * across)
    height = min(tiles - band * BAND, BAND)
    return band * BAND + within % height, within // height


class Dealt(NamedTuple):
    """Visits by expert, in whole tiles."""

    visits_P: Tensor  # int32; M where a tile is filled up
    experts_T: Tensor  # int32, counted from this rank's first; -1: nobody's
    rows: int  # of a tile


def most_tiles(visits: int, experts: int, rows: int) -> int:
    """How many tiles so many visits fill at most, when each of as many experts as possible fills up its last one."""
    return (visits + min(experts, visits) * (rows - 1)) // rows


def rows_of_tile(visits: int, experts: int) -> int:
    """The smallest tile that takes an expert's visits when all have equally many."""
    return next((rows for rows in (16, 32, 64) if visits <= rows * experts), 128)


def deal(chosen_NK: Tensor, first: int, experts: int, rows: int) -> Dealt:
    """Which visits each tile holds; `experts` are those of this rank."""
    visits = chosen_NK.numel()
    tiles = most_tiles(visits, experts, rows)
    counts_E, visits_P, experts_T = (
        torch.empty(size, dtype=torch.int32, device=chosen_NK.device) for size in (experts, tiles * rows, tiles)
    )
    early = dependent(len(chosen_NK))
    _count_kernel[experts,](chosen_NK, counts_E, first, visits, CHUNK=CHUNK, **early)
    _deal_kernel[experts + 1,](
        chosen_NK, counts_E, visits_P, experts_T, first, visits, experts, tiles,
        ROWS=rows, EXPERTS=triton.next_power_of_2(experts), CHUNK=CHUNK, **early,
    )  # fmt: skip
    return Dealt(visits_P, experts_T, rows)
