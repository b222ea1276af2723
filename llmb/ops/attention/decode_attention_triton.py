"""Triton kernel of decode attention: a program takes one KV split of one sequence for one KV head.

Before it waits for q, k and v, it loads its first tile of the cache, often its only one. The first split has the newest
token too, and writes it to the cache. Splits that a short sequence leaves empty end at once; the last of the others to
finish combines them all, so that no second kernel has to.
"""

from functools import cache as memoize

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.online_softmax_triton import (
    LOG2_E,
    MASKED,
    apply_softcap,
    attend_tile,
    mma_dtype,
    num_kv_splits,
    sink_logits,
    split_weights,
)
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.device_capabilities import scaled_to_sms

MAX_PROGRAMS = 1056  # 8 for each of an H200's multiprocessors
MIN_SPLIT_TOKENS = 64  # tokens of a sequence that a program should have at least
MAX_SPLITS = 64
WARPS = 8


@triton.jit
def _load_rope(x_ptr, d, mask, cos, sin, D: tl.constexpr, HAS_ROPE: tl.constexpr):
    """Load heads and apply RoPE to their pairs (i, i + D/2); `sin` is negated for the first of a pair."""
    x = tl.load(x_ptr + d, mask=mask, other=0.0)
    if HAS_ROPE:
        partner = tl.load(x_ptr + (d + D // 2) % D, mask=mask, other=0.0)
        x = (x.to(tl.float32) * cos + partner.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit
def _combine_splits(
    partial_ptr, lse_ptr, rows, d, valid, used,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge all splits by their log-sum-exps. Other multiprocessors wrote them, so L1 is bypassed."""
    s = tl.arange(0, SPLITS)
    lse = tl.load(
        lse_ptr + rows[:, None] + s[None, :] * GROUP,
        mask=valid & (s < used)[None, :],
        other=MASKED,
        cache_modifier=".cg",
    )
    weights, _ = split_weights(lse, 1)
    weights = weights / tl.sum(weights, 1)[:, None]
    acc = tl.zeros([ROWS, D], tl.float32)
    for split in tl.range(0, used, loop_unroll_factor=4):
        at = partial_ptr + (rows + split * GROUP)[:, None] * D + d[None, :]
        weight = tl.sum(tl.where(s[None, :] == split, weights, 0.0), 1)
        acc += tl.load(at, mask=valid, other=0.0, cache_modifier=".cg") * weight[:, None]
    return acc


@triton.jit
def _visible(token, oldest, context, HAS_WINDOW: tl.constexpr):
    """Return which cached tokens the newest one sees, [1, tokens]."""
    visible = token < context
    if HAS_WINDOW:
        visible = visible & (token >= oldest)
    return visible[None, :]


@triton.jit
def _decode_attention(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    slot_mapping_ptr,
    block_table_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    scale,
    key_scale,
    value_scale,
    softcap,
    window,
    block_table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    SPLITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    seq, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(seq_lens_ptr + seq) - 1  # tokens already in the cache; padding: -1
    tiles = tl.cdiv(tl.maximum(context, 0), L)
    oldest, skipped = 0, 0  # first token that is seen, and tiles before it
    if HAS_WINDOW:
        oldest = tl.maximum(context - window + 1, 0)
        skipped = oldest // L
    tiles_per_split = tl.maximum(tl.cdiv(tiles - skipped, SPLITS), 1)
    used = tl.maximum(tl.cdiv(tiles - skipped, tiles_per_split), 1)
    first = skipped + split * tiles_per_split
    last = tl.minimum(tiles, first + tiles_per_split)
    r, d, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, L)
    keys, values = keys_ptr + t[:, None] * D + d[None, :], values_ptr + d[:, None] * L + t[None, :]
    block_table = block_table_ptr + seq * block_table_stride
    at = (tl.load(block_table + first, mask=first < last, other=0).to(tl.int64) * G + head) * L * D
    k = tl.load(keys + at, mask=first < last, other=0.0)
    v = tl.load(values + at, mask=first < last, other=0.0)
    pdl_wait(USE_PDL)
    if (context < 0) | (split >= used):
        return
    is_first_split = split == 0
    cos, sin = 1.0, 0.0
    if HAS_ROPE:
        half = seq * (D // 2) + d % (D // 2)
        cos = tl.load(cos_ptr + half)
        sin = tl.load(sin_ptr + half) * tl.where(d < D // 2, -1.0, 1.0)
    row = qkv_ptr + seq * (GROUP + 2) * G * D
    valid = (r < GROUP)[:, None]
    q = _load_rope(row + (head * GROUP + r)[:, None] * D, d[None, :], valid, cos, sin, D, HAS_ROPE)
    new_k = _load_rope(row + (GROUP * G + head) * D, d, is_first_split, cos, sin, D, HAS_ROPE).to(tl.float32)
    new_v = tl.load(row + (GROUP * G + G + head) * D + d, mask=is_first_split, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping_ptr + seq)
    block, offset = slot // L, slot % L
    cached = is_first_split & (slot >= 0)
    dst = (block * G + head) * L * D
    tl.store(keys_ptr + dst + offset * D + d, (new_k / key_scale).to(keys_ptr.dtype.element_ty), mask=cached)
    tl.store(values_ptr + dst + d * L + offset, (new_v / value_scale).to(values_ptr.dtype.element_ty), mask=cached)

    newest_logit = apply_softcap(tl.sum(q.to(tl.float32) * new_k[None, :], 1) * scale, softcap, HAS_SOFTCAP)
    row_max = tl.where(is_first_split, newest_logit, MASKED)
    row_sum = tl.where(is_first_split, tl.full([ROWS], 1.0, tl.float32), 0.0)
    acc = tl.zeros([ROWS, D], tl.float32) + new_v[None, :]
    if HAS_SINKS:  # once, in the first split
        sink = tl.where(is_first_split, sink_logits(sinks_ptr, head * GROUP + r, r < GROUP), MASKED)
        top = tl.maximum(row_max, sink)
        rescale = tl.exp2(row_max - top)
        row_sum = tl.where(is_first_split, row_sum * rescale + tl.exp2(sink - top), row_sum)
        acc, row_max = acc * rescale[:, None], top
    q = q.to(COMPUTE)
    row_max, row_sum, acc = attend_tile(
        row_max, row_sum, acc, q, k, v, _visible(first * L + t, oldest, context, HAS_WINDOW), scale * key_scale,
        value_scale, softcap, COMPUTE, HAS_SOFTCAP,
    )  # fmt: skip
    for tile in tl.range(first + 1, last, num_stages=2):
        at = (tl.load(block_table + tile).to(tl.int64) * G + head) * L * D
        k, v = tl.load(keys + at), tl.load(values + at)
        row_max, row_sum, acc = attend_tile(
            row_max, row_sum, acc, q, k, v, _visible(tile * L + t, oldest, context, HAS_WINDOW), scale * key_scale,
            value_scale, softcap, COMPUTE, HAS_SOFTCAP,
        )  # fmt: skip
    acc = acc / row_sum[:, None]
    out = out_ptr + ((seq * G + head) * GROUP + r)[:, None] * D + d[None, :]
    if used > 1:
        rows = (seq * G + head) * SPLITS * GROUP + r  # splits follow one another, each with all queries
        tl.store(partial_ptr + (rows + split * GROUP)[:, None] * D + d[None, :], acc, mask=valid)
        tl.store(lse_ptr + rows + split * GROUP, row_max + tl.log2(row_sum), mask=r < GROUP)
        tl.debug_barrier()  # the whole program has written before it is counted
        arrivals = arrivals_ptr + seq * G + head
        if tl.atomic_add(arrivals, 1, sem="acq_rel") < used - 1:
            return
        tl.store(arrivals, 0)
        acc = _combine_splits(partial_ptr, lse_ptr, rows, d, valid, used, GROUP, ROWS, D, SPLITS)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=valid)


@memoize
def _arrival_counters(device: torch.device, count: int) -> Tensor:
    """Counters of finished programs, zero before and after each kernel: steps are serial, so all use the same."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def decode_attention_triton(
    qkv_NW: Tensor,
    cos_ND: Tensor | None,
    sin_ND: Tensor | None,
    cache: KvCache,
    slot_mapping_N: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute `decode_attention`; nothing is written of padding."""
    n, g, d, device = len(qkv_NW), cache.kv_heads, cache.head_dim, qkv_NW.device
    heads = qkv_NW.shape[1] // d - 2 * g
    programs, longest = scaled_to_sms(MAX_PROGRAMS, device), min(metadata.max_seq_len, window or metadata.max_seq_len)
    splits = num_kv_splits(n, g, longest, programs, MIN_SPLIT_TOKENS, MAX_SPLITS)
    out_NHD = torch.empty(n, heads, d, dtype=qkv_NW.dtype, device=device)
    partial = torch.empty(n * heads * splits, d, dtype=torch.float32, device=device)
    lse = torch.empty(n * heads * splits, dtype=torch.float32, device=device)
    _decode_attention[(n, g, splits)](
        qkv_NW, cos_ND, sin_ND, cache.keys_BGLD, cache.values_BGDL, sinks_H, slot_mapping_N,
        metadata.block_table_PM, metadata.seq_lens_P, out_NHD, partial, lse, _arrival_counters(device, n * g),
        scale * LOG2_E, cache.key_scale, cache.value_scale, softcap or 0.0, window or 0,
        metadata.block_table_PM.stride(0), GROUP=heads // g, ROWS=max(16, triton.next_power_of_2(heads // g)), G=g, D=d,
        L=cache.block_tokens, SPLITS=splits, COMPUTE=mma_dtype(cache.keys_BGLD.dtype),
        HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None, HAS_SINKS=sinks_H is not None,
        HAS_ROPE=cos_ND is not None, num_warps=WARPS,
        **pdl_options(n),
    )  # fmt: skip
    return out_NHD
