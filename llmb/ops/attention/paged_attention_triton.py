"""Triton for paged attention: one kernel for sequences that generate, one for chunks of prompts.

Generating reads every key and value once and computes little, so it is bound by memory: a program holds the queries of
one head of keys and goes through that head's blocks, or through a share of them where there are too few sequences to
fill the GPU; the shares are then put together by a second kernel. 8-bit keys and values become fp16, which holds all
of them exactly, on their way into the product.

A chunk of a prompt attends to what the cache holds of its sequence, then to itself. A long chunk without anything
before it needs no cache at all and goes to torch's attention, which is faster there.
"""

from itertools import groupby

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.attention.online_softmax_triton import FAR, LOG2_E, capped, shares_of, with_tile
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.dependent_launch import begins, dependent

FULL_GPU = 2112  # programs: 16 for each of an H200's processors
SHORTEST_SHARE = 128  # tokens of a sequence that a program should have at least
MOST_SHARES = 64
LONG_CHUNK = 512  # tokens from which torch's attention is the faster
CHUNK_TILE = 128  # query tokens of a program

# Slices of a step's numbers begin anywhere; that shall not mean one more kernel to compile for each.
ANYWHERE = ["table_ptr", "lengths_ptr", "starts_ptr"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=ANYWHERE)
def _decode(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    sums_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    scale,
    value_scale,
    cap,
    q_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    SHARES: tl.constexpr,
    COMPUTE: tl.constexpr,
    CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begins(DEPENDENT)
    part, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + part)
    tiles = tl.cdiv(length, L)
    each = tl.cdiv(tiles, SHARES)
    first, last = share * each, tl.minimum(tiles, (share + 1) * each)
    r, d, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, L)
    token = tl.load(starts_ptr + part).to(tl.int64)
    there = (r < GROUP)[:, None]
    q = tl.load(q_ptr + token * q_stride + (head * GROUP + r)[:, None] * D + d[None, :], mask=there, other=0.0)
    q = q.to(COMPUTE)
    top = tl.full([ROWS], FAR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    for tile in tl.range(first, last, num_stages=2):
        block = tl.load(table_ptr + part.to(tl.int64) * table_stride + tile).to(tl.int64)
        at = (block * G + head) * L * D
        k = tl.load(keys_ptr + at + t[:, None] * D + d[None, :]).to(COMPUTE)
        x = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, CAPPED)
        x = tl.where((tile * L + t)[None, :] < length, x, FAR)
        v = tl.load(values_ptr + at + d[:, None] * L + t[None, :]).to(COMPUTE)
        top, total, mixed = with_tile(top, total, mixed, x, tl.trans(v), 1.0)
    mixed = mixed * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    row = (part.to(tl.int64) * G + head) * GROUP + r
    if SHARES == 1:
        at = out_ptr + row[:, None] * D + d[None, :]
        tl.store(at, mixed.to(out_ptr.dtype.element_ty), mask=there)
    else:
        tl.store(out_ptr + (row * SHARES + share)[:, None] * D + d[None, :], mixed, mask=there)
        # What this share weighs, as a logarithm; a share without a token weighs nothing.
        tl.store(
            sums_ptr + row * SHARES + share,
            tl.where(total == 0.0, FAR, top + tl.log2(tl.where(total == 0.0, 1.0, total))),
            mask=r < GROUP,
        )


@triton.jit
def _together(
    shares_ptr,
    sums_ptr,
    out_ptr,
    D: tl.constexpr,
    SHARES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begins(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SHARES), tl.arange(0, D)
    sums = tl.load(sums_ptr + row * SHARES + s)
    weights = tl.exp2(sums - tl.max(sums))
    shares = tl.load(shares_ptr + (row * SHARES + s)[:, None] * D + d[None, :])
    mixed = tl.sum(shares * weights[:, None], 0) / tl.sum(weights)
    tl.store(out_ptr + row * D + d, mixed.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["table_stride", "first_part"], do_not_specialize_on_alignment=ANYWHERE)
def _chunk(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    scale,
    key_scale,
    value_scale,
    cap,
    stride,
    table_stride,
    first_part,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    TILE: tl.constexpr,
    SKIP_FROM: tl.constexpr,
    COMPUTE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2) + first_part
    begin = tl.load(starts_ptr + part)
    count = tl.load(starts_ptr + part + 1) - begin
    before = tl.load(lengths_ptr + part) - count
    if (tile * TILE >= count) | ((before == 0) & (count >= SKIP_FROM)):
        return
    m, d, t = tile * TILE + tl.arange(0, TILE), tl.arange(0, D), tl.arange(0, L)
    there = (m < count)[:, None]
    rows = (begin + m).to(tl.int64)
    q = tl.load(q_ptr + rows[:, None] * stride + head * D + d[None, :], mask=there, other=0.0)
    top = tl.full([TILE], FAR, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, D], tl.float32)
    kv_head = head // GROUP
    q16 = q.to(COMPUTE)
    for old in tl.range(0, tl.cdiv(before, L), num_stages=2):
        block = tl.load(table_ptr + part.to(tl.int64) * table_stride + old).to(tl.int64)
        at = (block * G + kv_head) * L * D
        k = tl.load(keys_ptr + at + t[:, None] * D + d[None, :]).to(COMPUTE)
        x = capped(tl.dot(q16, tl.trans(k), input_precision="ieee") * (scale * key_scale), cap, CAPPED)
        x = tl.where((old * L + t)[None, :] < before, x, FAR)
        v = tl.load(values_ptr + at + d[:, None] * L + t[None, :]).to(COMPUTE)
        top, total, mixed = with_tile(top, total, mixed, x, tl.trans(v), value_scale)
    for new in tl.range(0, tl.cdiv(tl.minimum(count, (tile + 1) * TILE), L), num_stages=3):
        own = new * L + t
        at = (begin + own).to(tl.int64) * stride + kv_head * D
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=(own < count)[:, None], other=0.0)
        x = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, CAPPED)
        x = tl.where(own[None, :] <= m[:, None], x, FAR)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=(own < count)[:, None], other=0.0)
        top, total, mixed = with_tile(top, total, mixed, x, v, 1.0)
    out = out_ptr + (rows * GROUP * G + head)[:, None] * D + d[None, :]
    tl.store(out, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)


def paged_attention_triton(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: KvCache,
    spans: Spans,
    scale: float,
    cap: float | None,
) -> Tensor:
    """As `paged_attention_reference`; q, k and v are rows of one matrix."""
    out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    if spans.decodes:
        _generate(q_NHD, cache, spans, scale, cap, out_NHD)
    if spans.parts:
        _read_prompts(q_NHD, k_NGD, v_NGD, cache, spans, scale, cap, out_NHD)
    return out_NHD


def _compute_type(cache: KvCache) -> tl.dtype:
    known = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return known.get(cache.keys_BGLD.dtype, tl.float16)


def _generate(q_NHD: Tensor, cache: KvCache, spans: Spans, scale: float, cap: float | None, out_NHD: Tensor) -> None:
    parts, heads, g, d = spans.decodes, q_NHD.shape[1], cache.kv_heads, cache.width
    group, shares = heads // g, shares_of(parts, g, spans.longest, FULL_GPU, SHORTEST_SHARE, MOST_SHARES)
    made, sums = out_NHD, spans.lengths_P
    if shares > 1:
        made = torch.empty(parts, heads, shares, d, dtype=torch.float32, device=q_NHD.device)
        sums = torch.empty(parts, heads, shares, dtype=torch.float32, device=q_NHD.device)
    _decode[(parts, g, shares)](
        q_NHD, cache.keys_BGLD, cache.values_BGDL, made, sums, spans.table_PM, spans.lengths_P, spans.starts_P1,
        scale * LOG2_E * cache.key_scale, cache.value_scale, cap or 0.0, q_NHD.stride(0), spans.table_PM.stride(0),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), G=g, D=d, L=cache.block_tokens, SHARES=shares,
        COMPUTE=_compute_type(cache), CAPPED=cap is not None, num_warps=2 if shares == 1 else 4, **dependent(parts),
    )  # fmt: skip
    if shares > 1:
        _together[(parts * heads,)](made, sums, out_NHD, D=d, SHARES=shares, num_warps=1, **dependent(parts))


def _read_prompts(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: KvCache,
    spans: Spans,
    scale: float,
    cap: float | None,
    out_NHD: Tensor,
) -> None:
    whole = cap is None and q_NHD.is_cuda
    skip_from = LONG_CHUNK if whole else 2**30
    begin, rest = spans.decodes, 0
    for (before, count), alike in groupby(spans.parts):  # neighbours of one length go together
        end = begin + count * len(list(alike))
        if before == 0 and count >= skip_from:
            q, k, v = (x[begin:end].unflatten(0, (-1, count)) for x in (q_NHD, k_NGD, v_NGD))
            out_NHD[begin:end] = _whole_prompts(q, k, v, scale)
        else:
            rest = max(rest, count)
        begin = end
    if rest:
        group = q_NHD.shape[1] // cache.kv_heads
        _chunk[(triton.cdiv(rest, CHUNK_TILE), q_NHD.shape[1], len(spans.parts))](
            q_NHD, k_NGD, v_NGD, cache.keys_BGLD, cache.values_BGDL, out_NHD,
            spans.table_PM, spans.lengths_P, spans.starts_P1,
            scale * LOG2_E, cache.key_scale, cache.value_scale, cap or 0.0,
            q_NHD.stride(0), spans.table_PM.stride(0), spans.decodes,
            GROUP=group, G=cache.kv_heads, D=cache.width, L=cache.block_tokens, TILE=CHUNK_TILE, SKIP_FROM=skip_from,
            COMPUTE=_compute_type(cache), CAPPED=cap is not None, num_warps=8,
        )  # fmt: skip


def _whole_prompts(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)
