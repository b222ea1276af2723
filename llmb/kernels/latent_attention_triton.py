"""Latent attention as Triton kernels; `latent_attention.py` says what it computes.

A part's queries of all heads are rows that share every latent: one program takes a tile of them, (token, head) pairs
one after the other, and walks over the context. A tile of latents is loaded once for both products. Where that makes
too few programs for the GPU, each part's context is split evenly, and a second kernel puts the splits together. Grids
follow from sizes the host knows; what a program does follows from lengths on the device, so all of it can be replayed.
"""

from functools import cache as remember

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.kernels.latent_attention import LatentCache, Turns
from llmb.kernels.paged_attention import Spans

LOG2_E = 1.4426950408889634
MOST_ROWS = 64  # of a tile: with a rank of 512, their sums fill half of a multiprocessor's registers
HEADS_OF_A_TURN = 16
MOST_WAVES = 4  # of programs that splitting the context may make
FIXED_TILES = 4  # what a program's beginning and end cost, in tiles of the context


@triton.jit
def _turned(pairs_at, cos, sin, inside):
    even = tl.load(pairs_at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(pairs_at + 1, mask=inside, other=0.0).to(tl.float32)
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _write_kernel(
    q, latent, key, norm, positions, frequencies, places, latents, keys,
    q_token, q_head, latent_token, key_token, heads, eps, inverse_scale,
    NOPE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, PAIRS: tl.constexpr, PAIRS_TILE: tl.constexpr,
    HEADS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, PAIRS_TILE)
    paired = pairs < PAIRS
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + pairs, mask=paired, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
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
        one, other = _turned(key + token * key_token + 2 * pairs, cos, sin, paired)
        target, kept = keys + place * (2 * PAIRS) + pairs, paired & (place >= 0)
        tl.store(target, one.to(keys.dtype.element_ty), mask=kept)
        tl.store(target + PAIRS, other.to(keys.dtype.element_ty), mask=kept)
    else:
        numbers = (group - 1) * HEADS + tl.arange(0, HEADS)
        there = (numbers < heads)[:, None] & paired[None, :]
        part = q + token * q_token + numbers[:, None] * q_head + NOPE
        first, second = _turned(part + 2 * pairs[None, :], cos[None, :], sin[None, :], there)
        tl.debug_barrier()  # all is read before any of it is written over
        tl.store(part + pairs[None, :], first.to(q.dtype.element_ty), mask=there)
        tl.store(part + PAIRS + pairs[None, :], second.to(q.dtype.element_ty), mask=there)


@triton.jit
def _attend_kernel(
    q_latent, q_turned, latents, keys, table, starts, lengths, out, sums,
    latent_token, latent_head, turned_token, turned_head, table_part, rows_of_all, logit_scale, cache_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, TURNED: tl.constexpr, TURNED_TILE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(starts + part), tl.load(lengths + part)
    count = tl.load(starts + part + 1) - start
    if tile * ROWS >= count * HEADS:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    there = rows < count * HEADS
    token, head = (start + rows // HEADS).to(tl.int64), rows % HEADS
    ranks, turned = tl.arange(0, RANK_TILE), tl.arange(0, TURNED_TILE)
    ranked, paired = ranks < RANK, turned < TURNED
    at_R1, at_K1 = token * latent_token + head * latent_head, token * turned_token + head * turned_head
    q_QR = tl.load(q_latent + at_R1[:, None] + ranks[None, :], mask=there[:, None] & ranked[None, :], other=0.0)
    q_QK = tl.load(q_turned + at_K1[:, None] + turned[None, :], mask=there[:, None] & paired[None, :], other=0.0)

    # A row sees the tokens before its own and that; the tile walks over what its last row sees of this split.
    seen_Q = tl.where(there, length - count + rows // HEADS + 1, 0)
    reach = tl.cdiv(tl.cdiv(length, SPLITS), TOKENS) * TOKENS
    first = split * reach
    last = tl.minimum(first + reach, tl.max(seen_Q))
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

    # Rows that see nothing (padding, a split beyond their place) come out as zero.
    mixed_QR *= (cache_scale / tl.where(total_Q > 0, total_Q, 1.0))[:, None]
    row = (start * HEADS + rows).to(tl.int64) + split * rows_of_all
    tl.store(
        out + row[:, None] * RANK + ranks[None, :],
        mixed_QR.to(out.dtype.element_ty),
        mask=there[:, None] & ranked[None, :],
    )
    if SPLITS > 1:
        tl.store(sums + row, largest_Q + tl.log2(total_Q), mask=there)


@triton.jit
def _combine_kernel(
    mixed, sums, starts, out, rows_of_all,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, SPLITS: tl.constexpr, SPLITS_TILE: tl.constexpr,
):  # fmt: skip
    number, part = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + part)
    if number >= (tl.load(starts + part + 1) - start) * HEADS:
        return
    row = (start * HEADS + number).to(tl.int64)
    splits = tl.arange(0, SPLITS_TILE)
    sum_S = tl.load(sums + row + splits * rows_of_all, mask=splits < SPLITS, other=float("-inf"))
    largest = tl.max(sum_S)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(sum_S - origin))
    ranks = tl.arange(0, RANK_TILE)
    ranked = ranks < RANK
    mixed_R = tl.zeros((RANK_TILE,), tl.float32)
    for split in range(SPLITS):
        at = row + split * rows_of_all
        share = tl.exp2(tl.load(sums + at) - origin)
        mixed_R += share * tl.load(mixed + at * RANK + ranks, mask=ranked & (share > 0), other=0.0)
    mixed_R /= tl.where(total > 0, total, 1.0)
    tl.store(out + row * RANK + ranks, mixed_R.to(out.dtype.element_ty), mask=ranked)


def turn_and_write_triton(
    q_NHD: Tensor,
    latent_NR: Tensor,
    key_NK: Tensor,
    norm_R: Tensor,
    eps: float,
    turns: Turns,
    cache: LatentCache,
    places_N: Tensor,
) -> None:
    """As `latent_attention.turn_and_write_reference`."""
    tokens, heads, width = q_NHD.shape
    rank, turned = latent_NR.shape[1], key_NK.shape[1]
    assert q_NHD.stride(2) == latent_NR.stride(1) == key_NK.stride(1) == 1
    if tokens == 0:
        return
    _write_kernel[tokens, 1 + triton.cdiv(heads, HEADS_OF_A_TURN)](
        q_NHD, latent_NR, key_NK, norm_R, turns.positions_N, turns.frequencies_F, places_N,
        cache.latents_BLR, cache.keys_BLK,
        q_NHD.stride(0), q_NHD.stride(1), latent_NR.stride(0), key_NK.stride(0), heads, eps, 1 / cache.scale,
        NOPE=width - turned, RANK=rank, RANK_TILE=triton.next_power_of_2(rank),
        PAIRS=turned // 2, PAIRS_TILE=triton.next_power_of_2(turned // 2), HEADS=HEADS_OF_A_TURN,
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
    rows = max(16, min(MOST_ROWS, triton.next_power_of_2(rows_of_part)))
    context, warps = tile_of(cache, rows)
    tiles = triton.cdiv(rows_of_part, rows)
    if splits is None:
        splits = splits_for(tiles * parts, triton.cdiv(spans.longest, context), multiprocessors(out_NHR.device))
    mixed, sums = out_NHR, out_NHR  # of one split, nothing is left to put together
    if splits > 1:
        mixed = torch.empty(splits, rows_of_all, rank, dtype=torch.float32, device=out_NHR.device)
        sums = torch.empty(splits, rows_of_all, dtype=torch.float32, device=out_NHR.device)
    sizes = {"HEADS": heads, "RANK": rank, "RANK_TILE": max(16, triton.next_power_of_2(rank)), "SPLITS": splits}
    _attend_kernel[tiles, splits, parts](
        q_latent_NHR, q_turned_NHK, cache.latents_BLR, cache.keys_BLK,
        spans.table_PM, spans.starts_P1, spans.lengths_P, mixed, sums,
        *q_latent_NHR.stride()[:2], *q_turned_NHK.stride()[:2], spans.table_PM.stride(0), rows_of_all,
        scale * LOG2_E, cache.scale, **sizes,
        TURNED=turned, TURNED_TILE=max(16, triton.next_power_of_2(turned)), BLOCK=cache.block_tokens,
        ROWS=rows, TOKENS=context, num_warps=warps, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[rows_of_part, parts](
            mixed, sums, spans.starts_P1, out_NHR, rows_of_all, **sizes, SPLITS_TILE=triton.next_power_of_2(splits)
        )
    return out_NHR


def tile_of(cache: LatentCache, rows: int) -> tuple[int, int]:
    """Tokens of a tile of the context and warps of a program: what a multiprocessor's memory and registers hold."""
    return 64, 8 if rows == MOST_ROWS else 4


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
