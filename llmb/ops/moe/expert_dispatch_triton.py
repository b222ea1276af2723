"""Triton kernels of `expert_dispatch.py`, one launch each.

There are few experts and ranks: every program sums all of their counts that it needs by itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 1024  # of a program
TILE_ELEMENTS, TILE_ROWS = 4096, 128  # rows times experts of a program, and rows at most


@triton.jit(do_not_specialize=["pairs", "capacity"])
def _assign_kernel(
    topk_ids_ptr, row_map_ptr, ends_ptr, out_ptr, out_ends_ptr, overflow_ptr, pairs, capacity,
    P: tl.constexpr, E: tl.constexpr, PADDED_PE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = pair < pairs
    rank = tl.load(topk_ids_ptr + pair, mask=mask, other=0).to(tl.int32) // E
    row = tl.load(row_map_ptr + pair, mask=mask, other=0) - _rank_start(ends_ptr, rank, E)
    tl.store(out_ptr + pair, tl.where(row < capacity, row + rank * capacity, -1), mask=mask)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, PADDED_PE)
        end = tl.load(ends_ptr + expert, mask=expert < P * E, other=0)
        end -= _rank_start(ends_ptr, tl.minimum(expert // E, P - 1), E)
        tl.store(out_ends_ptr + expert, tl.minimum(end, capacity), mask=expert < P * E)
        exceeds = (expert < P * E) & (expert % E == E - 1) & (end > capacity)
        tl.store(overflow_ptr, tl.load(overflow_ptr) + tl.sum(exceeds.to(tl.float32), 0))


@triton.jit
def _rank_start(ends_ptr, rank, E: tl.constexpr):
    """Return the first row of a rank among rows sorted by expert."""
    return tl.load(ends_ptr + rank * E - 1, mask=rank > 0, other=0)


@triton.jit(do_not_specialize=["rows"])
def _sort_kernel(
    ends_ptr, out_ptr, out_ends_ptr, rows,
    B: tl.constexpr, E: tl.constexpr, PADDED_B: tl.constexpr, PADDED_E: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    b, e = tl.arange(0, PADDED_B)[:, None], tl.arange(0, PADDED_E)
    mask = (b < B) & (e[None, :] < E)
    end = tl.load(ends_ptr + b * E + e[None, :], mask=mask, other=0)
    count = end - tl.load(ends_ptr + b * E + e[None, :] - 1, mask=mask & (e[None, :] > 0), other=0)
    sorted_end = tl.cumsum(tl.sum(count, 0), 0)
    if (block == 0) & (tl.program_id(1) == 0):
        tl.store(out_ends_ptr + e, sorted_end, mask=e < E)
    # Between a row of this block and its sorted row: the block's rows of an expert end before those of later blocks.
    block_end = tl.sum(tl.where(b == block, end, 0), 0)
    block_start = block_end - tl.sum(tl.where(b == block, count, 0), 0)
    shift = sorted_end - tl.sum(tl.where(b > block, count, 0), 0) - block_end
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] >= block_start[None, :]) & (row[:, None] < block_end[None, :]) & (e[None, :] < E)
    sorted_row = tl.sum(tl.where(inside, row[:, None] + shift[None, :] + 1, 0), 1) - 1  # -1 where inside none
    tl.store(out_ptr + block * rows + row, sorted_row, mask=row < rows)


def assign_send_rows_triton(
    topk_ids_NK: Tensor, row_map_NK: Tensor, ends_PE: Tensor, capacity: int, overflow: Tensor
) -> tuple[Tensor, Tensor]:
    """See `expert_dispatch.assign_send_rows`."""
    (p, e), pairs = ends_PE.shape, row_map_NK.numel()
    out_NK = torch.empty(row_map_NK.shape, dtype=torch.int32, device=row_map_NK.device)
    out_ends_PE = torch.empty(ends_PE.shape, dtype=torch.int32, device=ends_PE.device)
    _assign_kernel[(max(triton.cdiv(pairs, PAIRS), 1),)](
        topk_ids_NK.contiguous(), row_map_NK, ends_PE.contiguous(), out_NK, out_ends_PE, overflow, pairs, capacity,
        P=p, E=e, PADDED_PE=triton.next_power_of_2(p * e), PAIRS=PAIRS,
    )  # fmt: skip
    return out_NK, out_ends_PE


def sort_received_rows_triton(ends_BE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """See `expert_dispatch.sort_received_rows`."""
    (b, e), padded_e = ends_BE.shape, triton.next_power_of_2(ends_BE.shape[1])
    row_map_R1 = torch.empty(rows, 1, dtype=torch.int32, device=ends_BE.device)
    ends_E = torch.empty(e, dtype=torch.int32, device=ends_BE.device)
    tile = min(TILE_ROWS, max(TILE_ELEMENTS // padded_e, 1))
    _sort_kernel[(b, max(triton.cdiv(rows // b, tile), 1))](
        ends_BE.contiguous(), row_map_R1, ends_E, rows // b,
        B=b, E=e, PADDED_B=triton.next_power_of_2(b), PADDED_E=padded_e, TILE=tile,
    )  # fmt: skip
    return row_map_R1, ends_E
