"""Triton kernels of MLA; `mla_attention.py` says what they compute.

A sequence's queries of all heads are rows that share every latent: one program takes a tile of them, (token, head)
pairs one after the other, and walks over the context. A tile of latents is loaded once for both GEMMs. Where that makes
too few programs for the GPU, each sequence's context is split evenly (split-KV), and a second kernel combines the
splits. Grids depend on sizes that the host knows, the work of a program on lengths on the device, so that CUDA graphs
can replay all of it.
"""

import math
from functools import cache as memoize

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.errors import ConfigError
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.mla_attention import MlaCache
from llmb.ops.attention.online_softmax_triton import LOG2_E, split_weights
from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.device_capabilities import DeviceCapabilities, capabilities
from llmb.ops.quant.activation_quant import E4M3, E4M3_MAX

# Rows, and tokens of the context, of a tile. With a rank of 512 the accumulators of 64 rows take half of a
# multiprocessor's registers, and two tiles of latents with the queries all of its shared memory; with less of it tiles
# have fewer tokens. Tensor cores take no less than 16.
MAX_TILE, MAX_TILE_FP32, MIN_TILE = 64, 16, 16
PREFILL_TILE, PREFILL_TILE_FP32 = (128, 64), (32, 16)  # queries of one head, and keys
WARPS = 8
# Metadata tensors are slices of arbitrary alignment, which must not cause a recompilation.
UNALIGNED = ["block_table", "cu_seqlens", "seq_lens", "slot_mapping"]
HEAD_TILE = 16
MAX_WAVES = 2  # of programs that split-KV may make
OVERHEAD_TILES = 4  # cost of a program's prologue and epilogue, in tiles of the context


@triton.jit
def _load_rope(pairs_ptr, cos, sin, mask):
    even = tl.load(pairs_ptr, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(pairs_ptr + 1, mask=mask, other=0.0).to(tl.float32)
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _softmax_step(max_Q, sum_Q, acc_QV, logits_QT, v_TV):
    """Update the running softmax with a tile of keys; masked logits are -inf."""
    new_max_Q = tl.maximum(max_Q, tl.max(logits_QT, axis=1))
    origin_Q = tl.where(new_max_Q == float("-inf"), 0.0, new_max_Q)  # a row that has seen nothing yet
    p_QT = tl.exp2(logits_QT - origin_Q[:, None])
    rescale_Q = tl.exp2(max_Q - origin_Q)
    sum_Q = sum_Q * rescale_Q + tl.sum(p_QT, axis=1)
    acc_QV = tl.dot(p_QT.to(v_TV.dtype), v_TV, acc_QV * rescale_Q[:, None], input_precision="ieee")
    return new_max_Q, sum_Q, acc_QV


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _mla_rope_and_cache(
    q, latent, key, norm, cosines, sines, slot_mapping, latents, keys,
    q_token, q_head, latent_token, key_token, heads, eps, inverse_scale,
    NOPE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, PAIRS: tl.constexpr, PAIRS_TILE: tl.constexpr,
    HEADS: tl.constexpr, E4M3_MAX: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, PAIRS_TILE)
    is_pair = pairs < PAIRS
    cos = tl.load(cosines + token * PAIRS + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sines + token * PAIRS + pairs, mask=is_pair, other=0.0)
    if group == 0:
        slot = tl.load(slot_mapping + token)
        ranks = tl.arange(0, RANK_TILE)
        is_rank = ranks < RANK
        value = tl.load(latent + token * latent_token + ranks, mask=is_rank, other=0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value) / RANK + eps) * inverse_scale
        value *= tl.load(norm + ranks, mask=is_rank, other=0.0).to(tl.float32)
        if E4M3_MAX is not None:
            value = tl.minimum(tl.maximum(value, -E4M3_MAX), E4M3_MAX)
        tl.store(latents + slot * RANK + ranks, value.to(latents.dtype.element_ty), mask=is_rank & (slot >= 0))
        k_first, k_second = _load_rope(key + token * key_token + 2 * pairs, cos, sin, is_pair)
        target, cached = keys + slot * (2 * PAIRS) + pairs, is_pair & (slot >= 0)
        tl.store(target, k_first.to(keys.dtype.element_ty), mask=cached)
        tl.store(target + PAIRS, k_second.to(keys.dtype.element_ty), mask=cached)
    else:
        numbers = (group - 1) * HEADS + tl.arange(0, HEADS)
        valid = (numbers < heads)[:, None] & is_pair[None, :]
        q_rope = q + token * q_token + numbers[:, None] * q_head + NOPE
        q_first, q_second = _load_rope(q_rope + 2 * pairs[None, :], cos[None, :], sin[None, :], valid)
        tl.debug_barrier()  # all is read before any of it is overwritten
        tl.store(q_rope + pairs[None, :], q_first.to(q.dtype.element_ty), mask=valid)
        tl.store(q_rope + PAIRS + pairs[None, :], q_second.to(q.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["block_table_seq", "total_rows"], do_not_specialize_on_alignment=UNALIGNED)
def _mla_attention(
    q_latent, q_rope, latents, keys, block_table, cu_seqlens, seq_lens, out, lse,
    latent_token, latent_head, rope_token, rope_head, block_table_seq, total_rows, logit_scale, cache_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, ROPE: tl.constexpr, ROPE_TILE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    tile, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(cu_seqlens + seq), tl.load(seq_lens + seq)
    count = tl.load(cu_seqlens + seq + 1) - start
    if tile * ROWS >= count * HEADS:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    valid = rows < count * HEADS

    # A row sees the tokens up to its own; the tile walks over what its last row sees of this split.
    seen_Q = tl.where(valid, length - count + rows // HEADS + 1, 0)
    split_len = tl.cdiv(tl.cdiv(length, tl.num_programs(1)), TOKENS) * TOKENS
    first = split * split_len
    last = tl.minimum(first + split_len, tl.max(seen_Q))
    row = (start * HEADS + rows).to(tl.int64) + split * total_rows
    if SPLIT:  # noqa: SIM102 - the first is known at compile time, the second at run time
        if first >= last:
            tl.store(lse + row, tl.full((ROWS,), float("-inf"), tl.float32), mask=valid)
            return
    token, head = (start + rows // HEADS).to(tl.int64), rows % HEADS
    ranks, rope = tl.arange(0, RANK_TILE), tl.arange(0, ROPE_TILE)
    is_rank, is_pair = ranks < RANK, rope < ROPE
    at_R1, at_K1 = token * latent_token + head * latent_head, token * rope_token + head * rope_head
    q_QR = tl.load(q_latent + at_R1[:, None] + ranks[None, :], mask=valid[:, None] & is_rank[None, :], other=0.0)
    q_QK = tl.load(q_rope + at_K1[:, None] + rope[None, :], mask=valid[:, None] & is_pair[None, :], other=0.0)
    max_Q = tl.full((ROWS,), float("-inf"), tl.float32)
    sum_Q = tl.zeros((ROWS,), tl.float32)
    acc_QR = tl.zeros((ROWS, RANK_TILE), tl.float32)
    offsets = tl.arange(0, TOKENS)
    for begin in range(first, last, TOKENS):
        context = begin + offsets
        inside = context < last
        block = tl.load(block_table + seq.to(tl.int64) * block_table_seq + begin // BLOCK).to(tl.int64)
        slot = block * BLOCK + begin % BLOCK  # a tile lies within a block
        k_TR = tl.load(
            latents + slot * RANK + offsets[:, None] * RANK + ranks[None, :],
            mask=inside[:, None] & is_rank[None, :], other=0.0,
        ).to(q_QR.dtype)  # fmt: skip
        k_TK = tl.load(
            keys + slot * ROPE + offsets[:, None] * ROPE + rope[None, :],
            mask=inside[:, None] & is_pair[None, :], other=0.0,
        ).to(q_QK.dtype)  # fmt: skip
        logits_QT = tl.dot(q_QR, tl.trans(k_TR), input_precision="ieee")
        logits_QT = tl.dot(q_QK, tl.trans(k_TK), logits_QT, input_precision="ieee") * logit_scale
        logits_QT = tl.where(context[None, :] < seen_Q[:, None], logits_QT, float("-inf"))
        max_Q, sum_Q, acc_QR = _softmax_step(max_Q, sum_Q, acc_QR, logits_QT, k_TR)

    # Rows that see nothing (padding; a split beyond their position, but not beyond others') come out as zero.
    sum_Q = tl.where(sum_Q > 0, sum_Q, 1.0)
    acc_QR *= (cache_scale / sum_Q)[:, None]
    tl.store(
        out + row[:, None] * RANK + ranks[None, :],
        acc_QR.to(out.dtype.element_ty),
        mask=valid[:, None] & is_rank[None, :],
    )
    if SPLIT:
        tl.store(lse + row, max_Q + tl.log2(sum_Q), mask=valid)


@triton.jit(do_not_specialize=["total_rows", "splits"], do_not_specialize_on_alignment=UNALIGNED)
def _mla_combine_splits(
    partial, lse, cu_seqlens, out, total_rows, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, SPLITS_TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    number, seq = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens + seq)
    if number >= (tl.load(cu_seqlens + seq + 1) - start) * HEADS:
        return
    row = (start * HEADS + number).to(tl.int64)
    numbers = tl.arange(0, SPLITS_TILE)
    lse_S = tl.load(lse + row + numbers * total_rows, mask=numbers < splits, other=float("-inf"))
    weights_S, origin = split_weights(lse_S, 0)
    total = tl.sum(weights_S)
    ranks = tl.arange(0, RANK_TILE)
    is_rank = ranks < RANK
    acc_R = tl.zeros((RANK_TILE,), tl.float32)
    for split in range(splits):
        at = row + split * total_rows
        weight_R = tl.exp2(tl.load(lse + at) - origin) + tl.zeros((RANK_TILE,), tl.float32)
        written = is_rank & (weight_R > 0)  # an empty split wrote nothing
        acc_R += weight_R * tl.load(partial + at * RANK + ranks, mask=written, other=0.0)
    acc_R /= tl.where(total > 0, total, 1.0)
    tl.store(out + row * RANK + ranks, acc_R.to(out.dtype.element_ty), mask=is_rank)


@triton.jit(do_not_specialize=["count", "length"])
def _mla_prefill(
    q, kv, keys, out, q_token, q_head, kv_token, kv_head, out_token, out_head, count, length, logit_scale,
    NOPE: tl.constexpr, NOPE_TILE: tl.constexpr, ROPE: tl.constexpr, ROPE_TILE: tl.constexpr,
    VALUE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)  # those with most work first
    rows, offsets = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    nope_dims, rope, values = tl.arange(0, NOPE_TILE), tl.arange(0, ROPE_TILE), tl.arange(0, VALUE_TILE)
    valid = (rows < count)[:, None]
    q_at = q + rows[:, None].to(tl.int64) * q_token + head * q_head
    q_QN = tl.load(q_at + nope_dims[None, :], mask=valid & (nope_dims < NOPE)[None, :], other=0.0)
    q_QK = tl.load(q_at + NOPE + rope[None, :], mask=valid & (rope < ROPE)[None, :], other=0.0)
    kv += head * kv_head
    context_len = length - count  # tokens of earlier steps
    max_Q = tl.full((ROWS,), float("-inf"), tl.float32)
    sum_Q = tl.zeros((ROWS,), tl.float32)
    acc_QV = tl.zeros((ROWS, VALUE_TILE), tl.float32)
    for begin in range(0, tl.minimum(context_len + (tile + 1) * ROWS, length), TOKENS):
        context = begin + offsets
        inside = (context < length)[:, None]
        kv_at = kv + context[:, None].to(tl.int64) * kv_token
        k_TN = tl.load(kv_at + nope_dims[None, :], mask=inside & (nope_dims < NOPE)[None, :], other=0.0)
        k_TK = tl.load(keys + context[:, None] * ROPE + rope[None, :], mask=inside & (rope < ROPE)[None, :], other=0.0)
        v_TV = tl.load(kv_at + NOPE + values[None, :], mask=inside & (values < VALUE)[None, :], other=0.0)
        logits_QT = tl.dot(q_QN, tl.trans(k_TN), input_precision="ieee")
        logits_QT = tl.dot(q_QK, tl.trans(k_TK), logits_QT, input_precision="ieee") * logit_scale
        logits_QT = tl.where(context[None, :] <= context_len + rows[:, None], logits_QT, float("-inf"))
        max_Q, sum_Q, acc_QV = _softmax_step(max_Q, sum_Q, acc_QV, logits_QT, v_TV)
    out_at = out + rows[:, None].to(tl.int64) * out_token + head * out_head + values[None, :]
    acc_QV /= sum_Q[:, None]
    tl.store(out_at, acc_QV.to(out.dtype.element_ty), mask=valid & (values < VALUE)[None, :])


def mla_rope_and_cache_triton(
    q_NHD: Tensor,
    latent_NR: Tensor,
    key_NK: Tensor,
    norm_R: Tensor,
    eps: float,
    cos_NF: Tensor,
    sin_NF: Tensor,
    cache: MlaCache,
    slot_mapping_N: Tensor,
) -> None:
    """Compute `mla_rope_and_cache`."""
    tokens, heads, width = q_NHD.shape
    rank, rope = latent_NR.shape[1], key_NK.shape[1]
    assert q_NHD.stride(2) == latent_NR.stride(1) == key_NK.stride(1) == 1
    if tokens == 0:
        return
    _mla_rope_and_cache[tokens, 1 + triton.cdiv(heads, HEAD_TILE)](
        q_NHD, latent_NR, key_NK, norm_R, cos_NF, sin_NF, slot_mapping_N,
        cache.latents_BLR, cache.keys_BLK,
        q_NHD.stride(0), q_NHD.stride(1), latent_NR.stride(0), key_NK.stride(0), heads, eps, 1 / cache.scale,
        NOPE=width - rope, RANK=rank, RANK_TILE=triton.next_power_of_2(rank),
        PAIRS=rope // 2, PAIRS_TILE=triton.next_power_of_2(rope // 2), HEADS=HEAD_TILE,
        E4M3_MAX=E4M3_MAX if cache.latents_BLR.dtype == E4M3 else None, **pdl_options(tokens),
    )  # fmt: skip


def mla_attention_triton(
    q_latent_NHR: Tensor, q_rope_NHK: Tensor, cache: MlaCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Compute `mla_attention`."""
    if cache.scale != 1.0:
        q_latent_NHR = q_latent_NHR * cache.scale
    tokens, heads, rank = q_latent_NHR.shape
    rope, sequences = q_rope_NHK.shape[2], len(metadata.seq_lens_P)
    assert q_latent_NHR.stride(2) == q_rope_NHK.stride(2) == 1
    out_NHR = q_latent_NHR.new_empty(tokens, heads, rank)
    if tokens == 0 or sequences == 0:
        return out_NHR
    rows_per_seq, total_rows = metadata.max_query_len * heads, tokens * heads
    rank_tile, rope_tile = (max(MIN_TILE, triton.next_power_of_2(n)) for n in (rank, rope))
    gpu = capabilities(out_NHR.device)
    row_channels, context_channels = tile_channels(gpu, rank_tile + rope_tile, cache.latents_BLR.dtype == E4M3)
    rows, context = tile_sizes(
        q_latent_NHR.dtype, rows_per_seq, cache.block_tokens, row_channels, context_channels, gpu.shared_memory_bytes
    )
    tiles = triton.cdiv(rows_per_seq, rows)
    context_tiles = triton.cdiv(metadata.max_seq_len, context)
    splits = num_mla_splits(tiles * sequences, context_tiles, multiprocessors(out_NHR.device))
    partial, lse = out_NHR, out_NHR  # one split writes the output itself
    if splits > 1:
        partial = torch.empty(splits, total_rows, rank, dtype=torch.float32, device=out_NHR.device)
        lse = torch.empty(splits, total_rows, dtype=torch.float32, device=out_NHR.device)
    sizes = {
        "HEADS": heads,
        "RANK": rank,
        "RANK_TILE": rank_tile,
    }
    _mla_attention[tiles, splits, sequences](
        q_latent_NHR, q_rope_NHK, cache.latents_BLR, cache.keys_BLK,
        metadata.block_table_PM, metadata.cu_seqlens_P1, metadata.seq_lens_P, partial, lse,
        *q_latent_NHR.stride()[:2], *q_rope_NHK.stride()[:2], metadata.block_table_PM.stride(0), total_rows,
        scale * LOG2_E, cache.scale, **sizes,
        ROPE=rope, ROPE_TILE=rope_tile, BLOCK=cache.block_tokens,
        ROWS=rows, TOKENS=context, SPLIT=splits > 1, num_warps=WARPS, num_stages=2, **pdl_options(tokens),
    )  # fmt: skip
    if splits > 1:
        _mla_combine_splits[rows_per_seq, sequences](
            partial, lse, metadata.cu_seqlens_P1, out_NHR, total_rows, splits,
            **sizes, SPLITS_TILE=triton.next_power_of_2(splits), **pdl_options(tokens),
        )  # fmt: skip
    return out_NHR


def mla_prefill_attention_triton(q_NHD: Tensor, kv_THW: Tensor, keys_TK: Tensor, scale: float) -> Tensor:
    """Compute `mla_prefill_attention`."""
    count, heads, width = q_NHD.shape
    rope, nope = keys_TK.shape[1], width - keys_TK.shape[1]
    value = kv_THW.shape[2] - nope
    assert q_NHD.stride(2) == kv_THW.stride(2) == 1
    assert keys_TK.is_contiguous()
    out_NHV = q_NHD.new_empty(count, heads, value)
    rows, tokens = PREFILL_TILE_FP32 if q_NHD.dtype == torch.float32 else PREFILL_TILE
    nope_tile, rope_tile, value_tile = (max(MIN_TILE, triton.next_power_of_2(n)) for n in (nope, rope, value))
    _mla_prefill[triton.cdiv(count, rows), heads](
        q_NHD, kv_THW, keys_TK, out_NHV,
        *q_NHD.stride()[:2], *kv_THW.stride()[:2], *out_NHV.stride()[:2], count, len(keys_TK), scale * LOG2_E,
        NOPE=nope, NOPE_TILE=nope_tile, ROPE=rope, ROPE_TILE=rope_tile, VALUE=value, VALUE_TILE=value_tile,
        ROWS=rows, TOKENS=tokens, num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return out_NHV


def tile_sizes(
    dtype: torch.dtype,
    rows: int,
    block_tokens: int,
    row_channels: int = 0,
    context_channels: int = 0,
    shared_bytes: int | None = None,
) -> tuple[int, int]:
    """Return rows and context tokens of a tile: no more tokens than a block has, and than fit the shared memory.

    It holds so many channels of each row and of each token, and the probabilities.
    """
    limit = MAX_TILE_FP32 if dtype == torch.float32 else MAX_TILE
    tokens = math.gcd(block_tokens, limit)
    if tokens < MIN_TILE:
        raise ConfigError(f"block_tokens={block_tokens}: MLA on a GPU needs a multiple of {MIN_TILE}")
    rows = max(MIN_TILE, min(limit, triton.next_power_of_2(rows)))
    if shared_bytes is not None:
        numbers = shared_bytes // dtype.itemsize
        while tokens > MIN_TILE and rows * row_channels + tokens * (context_channels + rows) > numbers:
            tokens //= 2
    return rows, tokens


def tile_channels(gpu: DeviceCapabilities, channels: int, quantized: bool) -> tuple[int, int]:
    """Return the channels of a row and of a context token that are in shared memory at a time, as Triton compiles it.

    Hopper's asynchronous matmuls read two stages of the context; those of compute capability 10 nearly two copies of
    each, unless it is widened from fp8 first.
    """
    major = (gpu.compute or (9, 0))[0]
    copies = {9: 2, 10: 2 if quantized else 4}.get(major, 1)
    return channels, copies * channels


def multiprocessors(device: torch.device) -> int:
    """Return how many programs run at once: each takes most of a multiprocessor. In the interpreter, one."""
    return capabilities(device).sms


@memoize
def num_mla_splits(programs: int, tiles: int, multiprocessor_count: int) -> int:
    """Return into how many splits a context of so many tiles goes, where so many programs would take it whole."""

    def cost(splits: int) -> int:
        return triton.cdiv(programs * splits, multiprocessor_count) * (triton.cdiv(tiles, splits) + OVERHEAD_TILES)

    return min(range(1, max(1, min(tiles, MAX_WAVES * multiprocessor_count // programs)) + 1), key=cost)
