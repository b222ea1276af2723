"""Latent attention as Triton kernels; `mla_attention.py` says what it computes.

A part's queries of all heads are rows that share every latent: one program takes a tile of them, (token, head) pairs
one after the other, and walks over the context. A tile of latents is loaded once for both products. Where that makes
too few programs for the GPU, each part's context is split evenly, and a second kernel puts the splits together. Grids
follow from sizes the host knows; what a program does follows from lengths on the device, so all of it can be replayed.
"""

import math
from functools import cache as remember

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.errors import ConfigError
from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.attention.mla_attention import LatentCache
from llmb.ops.attention.online_softmax_triton import LOG2_E
from llmb.ops.dependent_launch import begins, dependent
from llmb.ops.quant.activation_quant import E4M3, LARGEST

# Rows, and tokens of the context, of a tile. With a rank of 512 the sums of 64 rows take half of a multiprocessor's
# registers, and two tiles of latents with the queries all of its memory. Tensor cores take no less than 16.
LARGEST_TILE, LARGEST_TILE_FP32, SMALLEST_TILE = 64, 16, 16
PROMPT_TILE, PROMPT_TILE_FP32 = (128, 64), (32, 16)  # queries of one head, and tokens they meet
WARPS = 8
# Slices of a step's numbers begin anywhere; that shall not mean one more kernel to compile for each.
ANYWHERE = ["table", "starts", "lengths", "places"]
HEADS_AT_ONCE = 16
MOST_WAVES = 2  # of programs that splitting the context may make
FIXED_TILES = 4  # what a program's beginning and end cost, in tiles of the context


@triton.jit
def _rotated(pairs_at, cos, sin, inside):
    even = tl.load(pairs_at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(pairs_at + 1, mask=inside, other=0.0).to(tl.float32)
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _write_kernel(
    q, latent, key, norm, cosines, sines, places, latents, keys,
    q_token, q_head, latent_token, key_token, heads, eps, inverse_scale,
    NOPE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, PAIRS: tl.constexpr, PAIRS_TILE: tl.constexpr,
    HEADS: tl.constexpr, LARGEST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begins(DEPENDENT)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, PAIRS_TILE)
    paired = pairs < PAIRS
    cos = tl.load(cosines + token * PAIRS + pairs, mask=paired, other=0.0)
    sin = tl.load(sines + token * PAIRS + pairs, mask=paired, other=0.0)
    if group == 0:
        place = tl.load(places + token)
        ranks = tl.arange(0, RANK_TILE)
        ranked = ranks < RANK
        value = tl.load(latent + token * latent_token + ranks, mask=ranked, other=0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value) / RANK + eps) * inverse_scale
        value *= tl.load(norm + ranks, mask=ranked, other=0.0).to(tl.float32)
        if LARGEST is not None:
            value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
        tl.store(latents + place * RANK + ranks, value.to(latents.dtype.element_ty), mask=ranked & (place >= 0))
        one, other = _rotated(key + token * key_token + 2 * pairs, cos, sin, paired)
        target, kept = keys + place * (2 * PAIRS) + pairs, paired & (place >= 0)
        tl.store(target, one.to(keys.dtype.element_ty), mask=kept)
        tl.store(target + PAIRS, other.to(keys.dtype.element_ty), mask=kept)
    else:
        numbers = (group - 1) * HEADS + tl.arange(0, HEADS)
        there = (numbers < heads)[:, None] & paired[None, :]
        part = q + token * q_token + numbers[:, None] * q_head + NOPE
        first, second = _rotated(part + 2 * pairs[None, :], cos[None, :], sin[None, :], there)
        tl.debug_barrier()  # all is read before any of it is written over
        tl.store(part + pairs[None, :], first.to(q.dtype.element_ty), mask=there)
        tl.store(part + PAIRS + pairs[None, :], second.to(q.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["table_part", "rows_of_all"], do_not_specialize_on_alignment=ANYWHERE)
def _attend_kernel(
    q_latent, q_turned, latents, keys, table, starts, lengths, out, sums,
    latent_token, latent_head, turned_token, turned_head, table_part, rows_of_all, logit_scale, cache_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, TURNED: tl.constexpr, TURNED_TILE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begins(DEPENDENT)
    tile, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(starts + part), tl.load(lengths + part)
    count = tl.load(starts + part + 1) - start
    if tile * ROWS >= count * HEADS:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    there = rows < count * HEADS

    # A row sees the tokens before its own and that; the tile walks over what its last row sees of this split.
    seen_Q = tl.where(there, length - count + rows // HEADS + 1, 0)
    reach = tl.cdiv(tl.cdiv(length, tl.num_programs(1)), TOKENS) * TOKENS
    first = split * reach
    last = tl.minimum(first + reach, tl.max(seen_Q))
    row = (start * HEADS + rows).to(tl.int64) + split * rows_of_all
    if SPLIT:  # noqa: SIM102 - one is known to the compiler, the other to the program
        if first >= last:
            tl.store(sums + row, tl.full((ROWS,), float("-inf"), tl.float32), mask=there)
            return
    token, head = (start + rows // HEADS).to(tl.int64), rows % HEADS
    ranks, turned = tl.arange(0, RANK_TILE), tl.arange(0, TURNED_TILE)
    ranked, paired = ranks < RANK, turned < TURNED
    at_R1, at_K1 = token * latent_token + head * latent_head, token * turned_token + head * turned_head
    q_QR = tl.load(q_latent + at_R1[:, None] + ranks[None, :], mask=there[:, None] & ranked[None, :], other=0.0)
    q_QK = tl.load(q_turned + at_K1[:, None] + turned[None, :], mask=there[:, None] & paired[None, :], other=0.0)
    largest_Q = tl.full((ROWS,), float("-inf"), tl.float32)
    total_Q = tl.zeros((ROWS,), tl.float32)
    mixed_QR = tl.zeros((ROWS, RANK_TILE), tl.float32)
    offsets = tl.arange(0, TOKENS)
    for begin in range(first, last, TOKENS):
        context = begin + offsets
        inside = context < last
        block = tl.load(table + part.to(tl.int64) * table_part + begin // BLOCK).to(tl.int64)
        place = block * BLOCK + begin % BLOCK  # a tile lies within a block
        k_TR = tl.load(
            latents + place * RANK + offsets[:, None] * RANK + ranks[None, :],
            mask=inside[:, None] & ranked[None, :], other=0.0,
        ).to(q_QR.dtype)  # fmt: skip
        k_TK = tl.load(
            keys + place * TURNED + offsets[:, None] * TURNED + turned[None, :],
            mask=inside[:, None] & paired[None, :], other=0.0,
        ).to(q_QK.dtype)  # fmt: skip
        logits_QT = tl.dot(q_QR, tl.trans(k_TR), input_precision="ieee")
        logits_QT = tl.dot(q_QK, tl.trans(k_TK), logits_QT, input_precision="ieee") * logit_scale
        logits_QT = tl.where(context[None, :] < seen_Q[:, None], logits_QT, float("-inf"))
        larger_Q = tl.maximum(largest_Q, tl.max(logits_QT, axis=1))
        origin_Q = tl.where(larger_Q == float("-inf"), 0.0, larger_Q)  # a row that has seen nothing yet
        share_QT = tl.exp2(logits_QT - origin_Q[:, None])
        fade_Q = tl.exp2(largest_Q - origin_Q)
        total_Q = total_Q * fade_Q + tl.sum(share_QT, axis=1)
        mixed_QR = tl.dot(share_QT.to(k_TR.dtype), k_TR, mixed_QR * fade_Q[:, None], input_precision="ieee")
        largest_Q = larger_Q

    # Rows that see nothing (padding; a split beyond their place, but not beyond others') come out as zero.
    total_Q = tl.where(total_Q > 0, total_Q, 1.0)
    mixed_QR *= (cache_scale / total_Q)[:, None]
    tl.store(
        out + row[:, None] * RANK + ranks[None, :],
        mixed_QR.to(out.dtype.element_ty),
        mask=there[:, None] & ranked[None, :],
    )
    if SPLIT:
        tl.store(sums + row, largest_Q + tl.log2(total_Q), mask=there)


@triton.jit(do_not_specialize=["rows_of_all", "splits"], do_not_specialize_on_alignment=ANYWHERE)
def _combine_kernel(
    mixed, sums, starts, out, rows_of_all, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, SPLITS_TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begins(DEPENDENT)
    number, part = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + part)
    if number >= (tl.load(starts + part + 1) - start) * HEADS:
        return
    row = (start * HEADS + number).to(tl.int64)
    numbers = tl.arange(0, SPLITS_TILE)
    sum_S = tl.load(sums + row + numbers * rows_of_all, mask=numbers < splits, other=float("-inf"))
    largest = tl.max(sum_S)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(sum_S - origin))
    ranks = tl.arange(0, RANK_TILE)
    ranked = ranks < RANK
    mixed_R = tl.zeros((RANK_TILE,), tl.float32)
    for split in range(splits):
        at = row + split * rows_of_all
        share_R = tl.exp2(tl.load(sums + at) - origin) + tl.zeros((RANK_TILE,), tl.float32)
        written = ranked & (share_R > 0)  # a split that is empty wrote nothing
        mixed_R += share_R * tl.load(mixed + at * RANK + ranks, mask=written, other=0.0)
    mixed_R /= tl.where(total > 0, total, 1.0)
    tl.store(out + row * RANK + ranks, mixed_R.to(out.dtype.element_ty), mask=ranked)


@triton.jit(do_not_specialize=["count", "length"])
def _prompt_kernel(
    q, kv, keys, out, q_token, q_head, kv_token, kv_head, out_token, out_head, count, length, logit_scale,
    NOPE: tl.constexpr, NOPE_TILE: tl.constexpr, TURNED: tl.constexpr, TURNED_TILE: tl.constexpr,
    VALUE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)  # those with most work first
    rows, offsets = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    still, turned, values = tl.arange(0, NOPE_TILE), tl.arange(0, TURNED_TILE), tl.arange(0, VALUE_TILE)
    there = (rows < count)[:, None]
    q_at = q + rows[:, None].to(tl.int64) * q_token + head * q_head
    q_QN = tl.load(q_at + still[None, :], mask=there & (still < NOPE)[None, :], other=0.0)
    q_QK = tl.load(q_at + NOPE + turned[None, :], mask=there & (turned < TURNED)[None, :], other=0.0)
    kv += head * kv_head
    before = length - count  # tokens of earlier steps
    largest_Q = tl.full((ROWS,), float("-inf"), tl.float32)
    total_Q = tl.zeros((ROWS,), tl.float32)
    mixed_QV = tl.zeros((ROWS, VALUE_TILE), tl.float32)
    for begin in range(0, tl.minimum(before + (tile + 1) * ROWS, length), TOKENS):
        context = begin + offsets
        inside = (context < length)[:, None]
        kv_at = kv + context[:, None].to(tl.int64) * kv_token
        k_TN = tl.load(kv_at + still[None, :], mask=inside & (still < NOPE)[None, :], other=0.0)
        k_TK = tl.load(
            keys + context[:, None] * TURNED + turned[None, :], mask=inside & (turned < TURNED)[None, :], other=0.0
        )
        v_TV = tl.load(kv_at + NOPE + values[None, :], mask=inside & (values < VALUE)[None, :], other=0.0)
        logits_QT = tl.dot(q_QN, tl.trans(k_TN), input_precision="ieee")
        logits_QT = tl.dot(q_QK, tl.trans(k_TK), logits_QT, input_precision="ieee") * logit_scale
        logits_QT = tl.where(context[None, :] <= before + rows[:, None], logits_QT, float("-inf"))
        larger_Q = tl.maximum(largest_Q, tl.max(logits_QT, axis=1))  # all rows see the first token
        share_QT = tl.exp2(logits_QT - larger_Q[:, None])
        fade_Q = tl.exp2(largest_Q - larger_Q)
        total_Q = total_Q * fade_Q + tl.sum(share_QT, axis=1)
        mixed_QV = tl.dot(share_QT.to(v_TV.dtype), v_TV, mixed_QV * fade_Q[:, None], input_precision="ieee")
        largest_Q = larger_Q
    out_at = out + rows[:, None].to(tl.int64) * out_token + head * out_head + values[None, :]
    mixed_QV /= total_Q[:, None]
    tl.store(out_at, mixed_QV.to(out.dtype.element_ty), mask=there & (values < VALUE)[None, :])


def rotate_and_cache_latents_triton(
    q_NHD: Tensor,
    latent_NR: Tensor,
    key_NK: Tensor,
    norm_R: Tensor,
    eps: float,
    cos_NF: Tensor,
    sin_NF: Tensor,
    cache: LatentCache,
    places_N: Tensor,
) -> None:
    """As `latent_attention.rotate_and_cache_latents_reference`."""
    tokens, heads, width = q_NHD.shape
    rank, turned = latent_NR.shape[1], key_NK.shape[1]
    assert q_NHD.stride(2) == latent_NR.stride(1) == key_NK.stride(1) == 1
    if tokens == 0:
        return
    _write_kernel[tokens, 1 + triton.cdiv(heads, HEADS_AT_ONCE)](
        q_NHD, latent_NR, key_NK, norm_R, cos_NF, sin_NF, places_N,
        cache.latents_BLR, cache.keys_BLK,
        q_NHD.stride(0), q_NHD.stride(1), latent_NR.stride(0), key_NK.stride(0), heads, eps, 1 / cache.scale,
        NOPE=width - turned, RANK=rank, RANK_TILE=triton.next_power_of_2(rank),
        PAIRS=turned // 2, PAIRS_TILE=triton.next_power_of_2(turned // 2), HEADS=HEADS_AT_ONCE,
        LARGEST=LARGEST if cache.latents_BLR.dtype == E4M3 else None, **dependent(tokens),
    )  # fmt: skip


def latent_attention_triton(
    q_latent_NHR: Tensor,
    q_turned_NHK: Tensor,
    cache: LatentCache,
    spans: Spans,
    scale: float,
    splits: int | None = None,
) -> Tensor:
    """As `latent_attention.latent_attention_reference`; `splits` of the context are chosen unless given."""
    if cache.scale != 1.0:
        q_latent_NHR = q_latent_NHR * cache.scale
    tokens, heads, rank = q_latent_NHR.shape
    turned, parts = q_turned_NHK.shape[2], len(spans.lengths_P)
    assert q_latent_NHR.stride(2) == q_turned_NHK.stride(2) == 1
    out_NHR = q_latent_NHR.new_empty(tokens, heads, rank)
    if tokens == 0 or parts == 0:
        return out_NHR
    rows_of_part, rows_of_all = spans.longest_part * heads, tokens * heads
    rows, context = tile_sizes(q_latent_NHR.dtype, rows_of_part, cache.block_tokens)
    tiles = triton.cdiv(rows_of_part, rows)
    if splits is None:
        splits = splits_for(tiles * parts, triton.cdiv(spans.longest, context), multiprocessors(out_NHR.device))
    mixed, sums = out_NHR, out_NHR  # of one split, nothing is left to put together
    if splits > 1:
        mixed = torch.empty(splits, rows_of_all, rank, dtype=torch.float32, device=out_NHR.device)
        sums = torch.empty(splits, rows_of_all, dtype=torch.float32, device=out_NHR.device)
    sizes = {
        "HEADS": heads,
        "RANK": rank,
        "RANK_TILE": max(SMALLEST_TILE, triton.next_power_of_2(rank)),
    }
    _attend_kernel[tiles, splits, parts](
        q_latent_NHR, q_turned_NHK, cache.latents_BLR, cache.keys_BLK,
        spans.table_PM, spans.starts_P1, spans.lengths_P, mixed, sums,
        *q_latent_NHR.stride()[:2], *q_turned_NHK.stride()[:2], spans.table_PM.stride(0), rows_of_all,
        scale * LOG2_E, cache.scale, **sizes,
        TURNED=turned, TURNED_TILE=max(SMALLEST_TILE, triton.next_power_of_2(turned)), BLOCK=cache.block_tokens,
        ROWS=rows, TOKENS=context, SPLIT=splits > 1, num_warps=WARPS, num_stages=2, **dependent(tokens),
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[rows_of_part, parts](
            mixed, sums, spans.starts_P1, out_NHR, rows_of_all, splits,
            **sizes, SPLITS_TILE=triton.next_power_of_2(splits), **dependent(tokens),
        )  # fmt: skip
    return out_NHR


def expanded_attention_triton(q_NHD: Tensor, kv_THW: Tensor, keys_TK: Tensor, scale: float) -> Tensor:
    """As `latent_attention.expanded_attention_reference`."""
    count, heads, width = q_NHD.shape
    turned, nope = keys_TK.shape[1], width - keys_TK.shape[1]
    value = kv_THW.shape[2] - nope
    assert q_NHD.stride(2) == kv_THW.stride(2) == 1
    assert keys_TK.is_contiguous()
    out_NHV = q_NHD.new_empty(count, heads, value)
    rows, tokens = PROMPT_TILE_FP32 if q_NHD.dtype == torch.float32 else PROMPT_TILE
    nope_tile, turned_tile, value_tile = (max(SMALLEST_TILE, triton.next_power_of_2(n)) for n in (nope, turned, value))
    _prompt_kernel[triton.cdiv(count, rows), heads](
        q_NHD, kv_THW, keys_TK, out_NHV,
        *q_NHD.stride()[:2], *kv_THW.stride()[:2], *out_NHV.stride()[:2], count, len(keys_TK), scale * LOG2_E,
        NOPE=nope, NOPE_TILE=nope_tile, TURNED=turned, TURNED_TILE=turned_tile, VALUE=value, VALUE_TILE=value_tile,
        ROWS=rows, TOKENS=tokens, num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return out_NHV


def tile_sizes(dtype: torch.dtype, rows: int, block_tokens: int) -> tuple[int, int]:
    """Rows, and tokens of the context, that a program multiplies at a time: no more tokens than a block has."""
    largest = LARGEST_TILE_FP32 if dtype == torch.float32 else LARGEST_TILE
    tokens = math.gcd(block_tokens, largest)
    if tokens < SMALLEST_TILE:
        raise ConfigError(f"block_tokens={block_tokens}: latent attention on a GPU wants a multiple of {SMALLEST_TILE}")
    return max(SMALLEST_TILE, min(largest, triton.next_power_of_2(rows))), tokens


@remember
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once: each takes most of a multiprocessor's memory. In the interpreter, one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@remember
def splits_for(programs: int, tiles: int, processors: int) -> int:
    """Into how many splits a context of so many tiles goes, where so many programs would take it whole."""

    def cost(splits: int) -> int:
        return triton.cdiv(programs * splits, processors) * (triton.cdiv(tiles, splits) + FIXED_TILES)

    return min(range(1, max(1, min(tiles, MOST_WAVES * processors // programs)) + 1), key=cost)
