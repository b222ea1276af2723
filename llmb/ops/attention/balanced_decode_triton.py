"""Triton kernel of paged decode that gives every program the same number of blocks, whatever the sequences' lengths.

The blocks of all sequences and KV heads stand in a row, and each program that the GPU runs at a time takes an equal
piece of it. So none waits for the last wave of programs. A sequence that a piece ends in is combined by the program
that is the last to finish a part of it.
"""

from functools import cache as memoize

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.online_softmax_triton import LOG2_E, MASKED, mma_dtype, sink_logits
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.attention.paged_attention_triton import UNALIGNED, attend_blocks


@triton.jit(do_not_specialize=["sequences", "block_table_stride"], do_not_specialize_on_alignment=UNALIGNED)
def balanced_decode(
    q_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    scale,
    value_scale,
    softcap,
    window,
    sequences,
    q_stride,
    block_table_stride,
    SEQUENCES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    s, r, d = tl.arange(0, SEQUENCES), tl.arange(0, ROWS), tl.arange(0, D)
    lengths = tl.load(seq_lens_ptr + s, mask=s < sequences, other=0)
    counts = tl.maximum(tl.cdiv(lengths, L), 1)  # padding counts as a tile
    if HAS_WINDOW:
        counts -= tl.maximum(lengths - window, 0) // L
    counts = tl.where(s < sequences, counts, 0)
    ends = tl.cumsum(counts, 0) * G
    total = (tl.sum(counts) * G).to(tl.int64)
    position, stop = (total * program // programs).to(tl.int32), (total * (program + 1) // programs).to(tl.int32)
    valid = (r < GROUP)[:, None]
    while position < stop:
        seq = tl.sum((ends <= position).to(tl.int32))
        tiles = tl.sum(tl.where(s == seq, counts, 0))
        begin = tl.sum(tl.where(s == seq, ends, 0)) - tiles * G
        head = (position - begin) // tiles
        begin += head * tiles
        first, last = position - begin, tl.minimum(tiles, stop - begin)
        length = tl.load(seq_lens_ptr + seq)
        oldest, skipped = 0, 0  # first token that is seen, and tiles before it
        if HAS_WINDOW:
            oldest = tl.maximum(length - window, 0)
            skipped = oldest // L
        token = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        q = tl.load(q_ptr + token * q_stride + (head * GROUP + r)[:, None] * D + d[None, :], mask=valid, other=0.0)
        row_max = tl.full([ROWS], MASKED, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:  # once, in the first part
            row_max = tl.where(first == 0, sink_logits(sinks_ptr, head * GROUP + r, r < GROUP), row_max)
            row_sum = tl.where(first == 0, row_sum + 1.0, row_sum)
        row_max, row_sum, acc = attend_blocks(
            row_max, row_sum, q.to(COMPUTE), keys_ptr, values_ptr,
            block_table_ptr + seq.to(tl.int64) * block_table_stride, head, skipped + first,
            tl.where(length > 0, skipped + last, 0), length, oldest, scale, softcap,
            ROWS, G, D, L, COMPUTE, HAS_SOFTCAP, HAS_WINDOW, STAGES,
        )  # fmt: skip
        acc = acc * (value_scale / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        finished = last - first == tiles
        if last - first < tiles:
            # A part that begins the sequence is the last of its program, any other one its first.
            part = ((2 * program + (first == 0).to(tl.int32)) * GROUP + r).to(tl.int64)
            tl.store(partial_ptr + part[:, None] * D + d[None, :], acc, mask=valid)
            tl.store(lse_ptr + part, row_max + tl.log2(row_sum), mask=r < GROUP)
            tl.debug_barrier()  # the whole program has written before it is counted
            # Programs whose pieces hold the first and the last tile.
            opening = (((begin + 1) * programs.to(tl.int64) - 1) // total).to(tl.int32)
            closing = (((begin + tiles).to(tl.int64) * programs - 1) // total).to(tl.int32)
            arrivals = arrivals_ptr + seq * G + head
            finished = tl.atomic_add(arrivals, 1, sem="acq_rel") == closing - opening
            if finished:
                tl.store(arrivals, 0)
                acc = _combine_parts(partial_ptr, lse_ptr, opening, closing, r, d, valid, GROUP, ROWS, D)
        if finished:
            row = (seq.to(tl.int64) * G + head) * GROUP + r
            tl.store(out_ptr + row[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid)
        position = begin + last


@triton.jit
def _combine_parts(
    partial_ptr, lse_ptr, opening, closing, r, d, valid, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    """Merge the parts of a sequence. Other multiprocessors wrote them, so L1 is bypassed."""
    top = tl.full([ROWS], MASKED, tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for program in range(opening, closing + 1):
        part = ((2 * program + (program == opening).to(tl.int32)) * GROUP + r).to(tl.int64)
        lse = tl.load(lse_ptr + part, mask=r < GROUP, other=0.0, cache_modifier=".cg")
        values = tl.load(partial_ptr + part[:, None] * D + d[None, :], mask=valid, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, lse)
        rescale, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        acc = acc * rescale[:, None] + values * weight[:, None]
        weight_sum, top = weight_sum * rescale + weight, new_top
    return acc / weight_sum[:, None]


@memoize
def arrival_counters(device: torch.device, count: int) -> Tensor:
    """Counters of finished parts, zero before and after each kernel: steps are serial, so all use the same."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def balanced_decode_triton(
    q_NHD: Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks_H: Tensor | None,
    out_NHD: Tensor,
    programs: int,
    warps: int,
    stages: int,
    maxnreg: int | None = None,
) -> None:
    """Attend with the newest tokens of all decodes, by at most so many programs."""
    sequences, heads, g, d, device = metadata.num_decodes, q_NHD.shape[1], cache.kv_heads, cache.head_dim, q_NHD.device
    group, programs = heads // g, min(programs, sequences * cache.kv_heads)  # a sequence has a tile at least
    partial = torch.empty(2 * programs * group, d, dtype=torch.float32, device=device)
    lse = torch.empty(2 * programs * group, dtype=torch.float32, device=device)
    balanced_decode[(programs,)](
        q_NHD, cache.keys_BGLD, cache.values_BGDL, sinks_H, out_NHD, partial, lse,
        arrival_counters(device, sequences * g), metadata.block_table_PM, metadata.seq_lens_P, metadata.cu_seqlens_P1,
        scale * LOG2_E * cache.key_scale, cache.value_scale, softcap or 0.0, window or 0, sequences,
        q_NHD.stride(0), metadata.block_table_PM.stride(0),
        SEQUENCES=triton.next_power_of_2(sequences), GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), G=g, D=d,
        L=cache.block_tokens, COMPUTE=mma_dtype(cache.keys_BGLD.dtype), HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None, HAS_SINKS=sinks_H is not None, STAGES=stages, num_warps=warps,
        maxnreg=maxnreg,
    )  # fmt: skip
