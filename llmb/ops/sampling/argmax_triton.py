"""Triton for the place of the largest: of chunks of a row first, each by a program, then among those."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import begins, dependent

FEW_ROWS = 64  # up to which short chunks fill the GPU better
SHORT_CHUNK, LONG_CHUNK = 2048, 8192
WARPS = 4


@triton.jit
def _chunk_winners(x_ptr, largest_ptr, places_ptr, V, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):
    begins(DEPENDENT)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    largest, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(1) + chunk
    tl.store(largest_ptr + at, largest)
    tl.store(places_ptr + at, chunk * CHUNK + place)


@triton.jit
def _winners(largest_ptr, places_ptr, out_ptr, chunks, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr):
    begins(DEPENDENT)
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    largest = tl.load(largest_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
    _, winner = tl.max(largest, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(places_ptr + row * chunks + winner).to(tl.int64))


def argmax_triton(x_SV: Tensor) -> Tensor:
    """As torch's over the last dimension."""
    s, v = x_SV.shape
    chunk = SHORT_CHUNK if s <= FEW_ROWS else LONG_CHUNK
    chunks = triton.cdiv(v, chunk)
    largest_SC = torch.empty(s, chunks, dtype=torch.float32, device=x_SV.device)
    places_SC = torch.empty(s, chunks, dtype=torch.int32, device=x_SV.device)
    out_S = torch.empty(s, dtype=torch.int64, device=x_SV.device)
    if s:
        _chunk_winners[(s, chunks)](
            x_SV.contiguous(), largest_SC, places_SC, v, CHUNK=chunk, num_warps=WARPS, **dependent(s)
        )
        _winners[(s,)](
            largest_SC, places_SC, out_S, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **dependent(s)
        )
    return out_S
