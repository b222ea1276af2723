"""Triton for attention of a handful of sequences: a program takes a share of one sequence for one head of keys.

Before it waits for q, k and v, it reads its first tile of the cache, often its only one. The first share has the newest
token too, and writes it to the cache. Shares that a short sequence leaves empty end at once; the last of the others to
be done puts them all together, so that no second kernel has to.
"""

from functools import cache as remember

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.attention.online_softmax_triton import FAR, LOG2_E, capped, shares_of, with_tile
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.dependent_launch import begins, dependent

FULL_GPU = 1056  # programs: 8 for each of an H200's processors
SHORTEST_SHARE = 64  # tokens of a sequence that a program should have at least
MOST_SHARES = 64
WARPS = 8


@triton.jit
def _turned(x_ptr, d, mask, cos, sin, D: tl.constexpr, ROTATES: tl.constexpr):
    """Rows of heads, the pairs (i, i + D/2) of each turned; `sin` has the sign that it has for the first of a pair."""
    x = tl.load(x_ptr + d, mask=mask, other=0.0)
    if ROTATES:
        other = tl.load(x_ptr + (d + D // 2) % D, mask=mask, other=0.0)
        x = (x.to(tl.float32) * cos + other.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit
def _attended(top, total, mixed, q, k, v, seen, scale, value_scale, cap, COMPUTE: tl.constexpr, CAPPED: tl.constexpr):
    """The softmax so far with one more tile of the cache."""
    x = capped(tl.dot(q, tl.trans(k.to(COMPUTE))) * scale, cap, CAPPED)
    x = tl.where(seen[None, :], x, FAR)  # weighs nothing: every share has a token, so the highest logit is not far
    return with_tile(top, total, mixed, x, tl.trans(v.to(COMPUTE)), value_scale)


@triton.jit
def _together(
    shares_ptr,
    sums_ptr,
    rows,
    d,
    there,
    used,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    SHARES: tl.constexpr,
):
    """What all shares made, each by its weight. They come from other processors, so not through this one's cache."""
    s = tl.arange(0, SHARES)
    sums = tl.load(
        sums_ptr + rows[:, None] + s[None, :] * GROUP,
        mask=there & (s < used)[None, :],
        other=FAR,
        cache_modifier=".cg",
    )
    weights = tl.exp2(sums - tl.max(sums, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    mixed = tl.zeros([ROWS, D], tl.float32)
    for one in tl.range(0, used, loop_unroll_factor=4):
        at = shares_ptr + (rows + one * GROUP)[:, None] * D + d[None, :]
        weight = tl.sum(tl.where(s[None, :] == one, weights, 0.0), 1)
        mixed += tl.load(at, mask=there, other=0.0, cache_modifier=".cg") * weight[:, None]
    return mixed


@triton.jit
def _thin_attention(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    places_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    shares_ptr,
    sums_ptr,
    arrivals_ptr,
    scale,
    key_scale,
    value_scale,
    cap,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    SHARES: tl.constexpr,
    COMPUTE: tl.constexpr,
    CAPPED: tl.constexpr,
    ROTATES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    part, head, share = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    before = tl.load(lengths_ptr + part) - 1  # tokens that the cache has already; padding: -1
    tiles = tl.cdiv(tl.maximum(before, 0), L)
    each = tl.maximum(tl.cdiv(tiles, SHARES), 1)
    used = tl.maximum(tl.cdiv(tiles, each), 1)
    first, last = share * each, tl.minimum(tiles, (share + 1) * each)
    r, d, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, L)
    keys, values = keys_ptr + t[:, None] * D + d[None, :], values_ptr + d[:, None] * L + t[None, :]
    table = table_ptr + part * table_stride
    at = (tl.load(table + first, mask=first < last, other=0).to(tl.int64) * G + head) * L * D
    k = tl.load(keys + at, mask=first < last, other=0.0)
    v = tl.load(values + at, mask=first < last, other=0.0)
    begins(DEPENDENT)
    if (before < 0) | (share >= used):
        return
    newest = share == 0
    cos, sin = 1.0, 0.0
    if ROTATES:
        half = part * (D // 2) + d % (D // 2)
        cos = tl.load(cos_ptr + half)
        sin = tl.load(sin_ptr + half) * tl.where(d < D // 2, -1.0, 1.0)
    row = qkv_ptr + part * (GROUP + 2) * G * D
    there = (r < GROUP)[:, None]
    q = _turned(row + (head * GROUP + r)[:, None] * D, d[None, :], there, cos, sin, D, ROTATES)
    own_k = _turned(row + (GROUP * G + head) * D, d, newest, cos, sin, D, ROTATES).to(tl.float32)
    own_v = tl.load(row + (GROUP * G + G + head) * D + d, mask=newest, other=0.0).to(tl.float32)
    place = tl.load(places_ptr + part)
    block, offset = place // L, place % L
    kept = newest & (place >= 0)
    to = (block * G + head) * L * D
    tl.store(keys_ptr + to + offset * D + d, (own_k / key_scale).to(keys_ptr.dtype.element_ty), mask=kept)
    tl.store(values_ptr + to + d * L + offset, (own_v / value_scale).to(values_ptr.dtype.element_ty), mask=kept)

    own = capped(tl.sum(q.to(tl.float32) * own_k[None, :], 1) * scale, cap, CAPPED)
    top = tl.where(newest, own, FAR)
    total = tl.where(newest, tl.full([ROWS], 1.0, tl.float32), 0.0)
    mixed = tl.zeros([ROWS, D], tl.float32) + own_v[None, :]
    q = q.to(COMPUTE)
    top, total, mixed = _attended(
        top, total, mixed, q, k, v, first * L + t < before, scale * key_scale, value_scale, cap, COMPUTE, CAPPED
    )
    for tile in tl.range(first + 1, last, num_stages=2):
        at = (tl.load(table + tile).to(tl.int64) * G + head) * L * D
        k, v = tl.load(keys + at), tl.load(values + at)
        top, total, mixed = _attended(
            top, total, mixed, q, k, v, tile * L + t < before, scale * key_scale, value_scale, cap, COMPUTE, CAPPED
        )
    mixed = mixed / total[:, None]
    out = out_ptr + ((part * G + head) * GROUP + r)[:, None] * D + d[None, :]
    if used > 1:
        rows = (part * G + head) * SHARES * GROUP + r  # shares lie one after the other, each with all its queries
        tl.store(shares_ptr + (rows + share * GROUP)[:, None] * D + d[None, :], mixed, mask=there)
        tl.store(sums_ptr + rows + share * GROUP, top + tl.log2(total), mask=r < GROUP)
        tl.debug_barrier()  # the whole program has written before it is counted
        arrivals = arrivals_ptr + part * G + head
        if tl.atomic_add(arrivals, 1, sem="acq_rel") < used - 1:
            return
        tl.store(arrivals, 0)
        mixed = _together(shares_ptr, sums_ptr, rows, d, there, used, GROUP, ROWS, D, SHARES)
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=there)


@remember
def _arrivals(device: torch.device, count: int) -> Tensor:
    """Counters of programs that are done, zero before and after each kernel: steps follow one another, so all share."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def thin_attention_triton(
    qkv_NW: Tensor,
    cos_ND: Tensor | None,
    sin_ND: Tensor | None,
    cache: KvCache,
    places_N: Tensor,
    spans: Spans,
    scale: float,
    cap: float | None,
) -> Tensor:
    """As `thin_attention_reference`; of padding nothing is written."""
    n, g, d, device = len(qkv_NW), cache.kv_heads, cache.width, qkv_NW.device
    heads = qkv_NW.shape[1] // d - 2 * g
    shares = shares_of(n, g, spans.longest, FULL_GPU, SHORTEST_SHARE, MOST_SHARES)
    out_NHD = torch.empty(n, heads, d, dtype=qkv_NW.dtype, device=device)
    made = torch.empty(n * heads * shares, d, dtype=torch.float32, device=device)
    sums = torch.empty(n * heads * shares, dtype=torch.float32, device=device)
    compute = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}.get(cache.keys_BGLD.dtype, tl.float16)
    _thin_attention[(n, g, shares)](
        qkv_NW, cos_ND, sin_ND, cache.keys_BGLD, cache.values_BGDL, places_N, spans.table_PM, spans.lengths_P,
        out_NHD, made, sums, _arrivals(device, n * g), scale * LOG2_E, cache.key_scale, cache.value_scale, cap or 0.0,
        spans.table_PM.stride(0), GROUP=heads // g, ROWS=max(16, triton.next_power_of_2(heads // g)), G=g, D=d,
        L=cache.block_tokens, SHARES=shares, COMPUTE=compute, CAPPED=cap is not None, ROTATES=cos_ND is not None,
        num_warps=WARPS, **dependent(n),
    )  # fmt: skip
    return out_NHD
