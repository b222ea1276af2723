"""Triton kernels of argmax: first over chunks of a row, one program each, then over the chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import pdl_options, pdl_wait

FEW_ROWS = 64  # up to which short chunks fill the GPU better
SHORT_CHUNK, LONG_CHUNK = 2048, 8192
WARPS = 4


@triton.jit
def _chunk_argmax(x_ptr, max_ptr, index_ptr, V, CHUNK: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    largest, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + chunk
    tl.store(max_ptr + out, largest)
    tl.store(index_ptr + out, chunk * CHUNK + index)


@triton.jit
def _argmax_of_chunks(max_ptr, index_ptr, out_ptr, chunks, CHUNKS: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    largest = tl.load(max_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
    _, chunk = tl.max(largest, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(index_ptr + row * chunks + chunk).to(tl.int64))


def argmax_triton(x_SV: Tensor) -> Tensor:
    """Launch the kernels of `argmax.argmax`."""
    s, v = x_SV.shape
    chunk = SHORT_CHUNK if s <= FEW_ROWS else LONG_CHUNK
    chunks = triton.cdiv(v, chunk)
    max_SC = torch.empty(s, chunks, dtype=torch.float32, device=x_SV.device)
    index_SC = torch.empty(s, chunks, dtype=torch.int32, device=x_SV.device)
    out_S = torch.empty(s, dtype=torch.int64, device=x_SV.device)
    if s:
        _chunk_argmax[(s, chunks)](
            x_SV.contiguous(), max_SC, index_SC, v, CHUNK=chunk, num_warps=WARPS, **pdl_options(s)
        )
        _argmax_of_chunks[(s,)](
            max_SC, index_SC, out_S, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **pdl_options(s)
        )
    return out_S
