"""Triton kernels of paged attention: one for decodes, one for prefill chunks.

Decoding reads every key and value once and computes little, so it is bound by memory: a program holds the queries of
one KV head and goes through that head's blocks, or through one KV split of them where there are too few sequences to
fill the GPU; a second kernel then combines the splits. fp8 keys and values are converted to fp16, which holds all of
them exactly.

A prefill chunk attends to the cached tokens of its sequence, then to itself. A long chunk without any needs no cache at
all and goes to torch's attention, which is faster there, or to cuDNN's in fp8 where the run asks for it.
"""

from itertools import groupby

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.attention_sinks import add_sinks_
from llmb.ops.attention.fp8_prefill import MIN_TOKENS, fp8_prefill
from llmb.ops.attention.online_softmax_triton import (
    LOG2_E,
    MASKED,
    apply_softcap,
    attend_tile,
    mma_dtype,
    num_kv_splits,
    sink_logits,
    softmax_step,
    split_weights,
)
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.attention.segment_attention import Segment, causal_forward
from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.device_capabilities import DeviceCapabilities, capabilities, scaled_to_sms

MAX_PROGRAMS = 2112  # 16 for each of an H200's multiprocessors
MIN_SPLIT_TOKENS = 128  # tokens of a sequence that a program should have at least
MAX_SPLITS = 64
TWO_TILES = 16 * 1024  # most bytes of a block's keys and values of which two are held: more leave an SM few programs
LONG_CHUNK = 512  # tokens from which torch's attention is faster
PREFILL_TILES = ((128, 3), (64, 2), (64, 1))  # query tokens of a program, and stages of its loop over their keys

# Metadata tensors are slices of arbitrary alignment, which must not cause a recompilation.
UNALIGNED = ["block_table_ptr", "seq_lens_ptr", "cu_seqlens_ptr"]


@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=UNALIGNED)
def _paged_decode(
    q_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    scale,
    value_scale,
    softcap,
    window,
    q_stride,
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
    STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_wait(USE_PDL)
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens_ptr + seq)
    tiles = tl.cdiv(length, L)
    oldest, skipped = 0, 0  # first token that is seen, and tiles before it
    if HAS_WINDOW:
        oldest = tl.maximum(length - window, 0)
        skipped = oldest // L
    tiles_per_split = tl.cdiv(tiles - skipped, SPLITS)
    first = skipped + split * tiles_per_split
    last = tl.minimum(tiles, first + tiles_per_split)
    r, d, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, L)
    token = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    valid = (r < GROUP)[:, None]
    q = tl.load(q_ptr + token * q_stride + (head * GROUP + r)[:, None] * D + d[None, :], mask=valid, other=0.0)
    q = q.to(COMPUTE)
    row_max = tl.full([ROWS], MASKED, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # once, in the first split
        row_max = tl.where(split == 0, sink_logits(sinks_ptr, head * GROUP + r, r < GROUP), row_max)
        row_sum = tl.where(split == 0, row_sum + 1.0, row_sum)
    acc = tl.zeros([ROWS, D], tl.float32)
    # The block of a tile is loaded one tile ahead, and with 3 stages keys and values are loaded during the computation
    # of the tile before: no load waits for another.
    block_table = block_table_ptr + seq.to(tl.int64) * block_table_stride
    next_block = tl.load(block_table + first, mask=first < last, other=0)
    for tile in tl.range(first, last, num_stages=STAGES):
        offset = (next_block.to(tl.int64) * G + head) * L * D
        next_block = tl.load(block_table + tile + 1, mask=tile + 1 < last, other=0)
        k = tl.load(keys_ptr + offset + t[:, None] * D + d[None, :]).to(COMPUTE)
        logits = apply_softcap(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, softcap, HAS_SOFTCAP)
        visible = tile * L + t < length
        if HAS_WINDOW:
            visible = visible & (tile * L + t >= oldest)
        logits = tl.where(visible[None, :], logits, MASKED)
        # Values are loaded here, unlike in `attend_tile`: before the logits, they would take a fifth more registers.
        v = tl.load(values_ptr + offset + d[:, None] * L + t[None, :]).to(COMPUTE)
        row_max, row_sum, acc = softmax_step(row_max, row_sum, acc, logits, tl.trans(v), 1.0)
    acc = acc * (value_scale / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    row = (seq.to(tl.int64) * G + head) * GROUP + r
    if SPLITS == 1:
        dst = out_ptr + row[:, None] * D + d[None, :]
        tl.store(dst, acc.to(out_ptr.dtype.element_ty), mask=valid)
    else:
        tl.store(out_ptr + (row * SPLITS + split)[:, None] * D + d[None, :], acc, mask=valid)
        # The log-sum-exp of this split; one without a token has no weight.
        tl.store(
            lse_ptr + row * SPLITS + split,
            tl.where(row_sum == 0.0, MASKED, row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))),
            mask=r < GROUP,
        )


@triton.jit
def _combine_splits(
    partial_ptr,
    lse_ptr,
    out_ptr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    lse = tl.load(lse_ptr + row * SPLITS + s)
    weights, _ = split_weights(lse, 0)
    partial = tl.load(partial_ptr + (row * SPLITS + s)[:, None] * D + d[None, :])
    acc = tl.sum(partial * weights[:, None], 0) / tl.sum(weights)
    tl.store(out_ptr + row * D + d, acc.to(out_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=["block_table_stride", "first_seq", "skip_from"], do_not_specialize_on_alignment=UNALIGNED
)
def _paged_prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    out_ptr,
    block_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    scale,
    key_scale,
    value_scale,
    softcap,
    window,
    stride,
    block_table_stride,
    first_seq,
    skip_from,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2) + first_seq
    start = tl.load(cu_seqlens_ptr + seq)
    count = tl.load(cu_seqlens_ptr + seq + 1) - start
    context = tl.load(seq_lens_ptr + seq) - count
    if (tile * TILE >= count) | ((context == 0) & (count >= skip_from)):
        return
    m, d, t = tile * TILE + tl.arange(0, TILE), tl.arange(0, D), tl.arange(0, L)
    valid = (m < count)[:, None]
    rows = (start + m).to(tl.int64)
    q = tl.load(q_ptr + rows[:, None] * stride + head * D + d[None, :], mask=valid, other=0.0)
    row_max = tl.full([TILE], MASKED, tl.float32)
    row_sum = tl.zeros([TILE], tl.float32)
    if HAS_SINKS:
        row_max = sink_logits(sinks_ptr, head + m * 0, m >= 0)
        row_sum += 1.0
    acc = tl.zeros([TILE, D], tl.float32)
    kv_head = head // GROUP
    q16 = q.to(COMPUTE)
    first_cached, first_own = 0, 0  # tiles of keys before these are outside of all windows of this program's queries
    if HAS_WINDOW:
        first_cached = tl.maximum(context + tile * TILE - window + 1, 0) // L
        first_own = tl.maximum(tile * TILE - window + 1, 0) // L
    for cache_tile in tl.range(first_cached, tl.cdiv(context, L), num_stages=min(STAGES, 2)):
        block = tl.load(block_table_ptr + seq.to(tl.int64) * block_table_stride + cache_tile).to(tl.int64)
        offset = (block * G + kv_head) * L * D
        k = tl.load(keys_ptr + offset + t[:, None] * D + d[None, :])
        v = tl.load(values_ptr + offset + d[:, None] * L + t[None, :])
        visible = (cache_tile * L + t < context)[None, :]
        if HAS_WINDOW:
            visible = visible & ((cache_tile * L + t)[None, :] > context + m[:, None] - window)
        row_max, row_sum, acc = attend_tile(
            row_max, row_sum, acc, q16, k, v, visible, scale * key_scale, value_scale, softcap, COMPUTE, HAS_SOFTCAP
        )
    for chunk_tile in tl.range(first_own, tl.cdiv(tl.minimum(count, (tile + 1) * TILE), L), num_stages=STAGES):
        key = chunk_tile * L + t
        offset = (start + key).to(tl.int64) * stride + kv_head * D
        k = tl.load(k_ptr + offset[:, None] + d[None, :], mask=(key < count)[:, None], other=0.0)
        logits = apply_softcap(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, softcap, HAS_SOFTCAP)
        visible = key[None, :] <= m[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] > m[:, None] - window)
        logits = tl.where(visible, logits, MASKED)
        v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=(key < count)[:, None], other=0.0)
        row_max, row_sum, acc = softmax_step(row_max, row_sum, acc, logits, v, 1.0)
    out = out_ptr + (rows * GROUP * G + head)[:, None] * D + d[None, :]
    tl.store(out, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=valid)


def paged_attention_triton(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    fp8_prefills: bool = False,
) -> Tensor:
    """Compute `paged_attention`; q, k and v are slices of one tensor."""
    # Rows of padding behind the prefill chunks are not written, but a per-tensor scale of the next layer reads them.
    allocate = torch.zeros if metadata.padded_prefills else torch.empty
    out_NHD = allocate(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    if metadata.num_decodes:
        _decode(q_NHD, cache, metadata, scale, softcap, window, sinks_H, out_NHD)
    if metadata.prefill_chunks or metadata.padded_prefills:
        _prefill(q_NHD, k_NGD, v_NGD, cache, metadata, scale, softcap, window, sinks_H, fp8_prefills, out_NHD)
    return out_NHD


def _decode(
    q_NHD: Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks_H: Tensor | None,
    out_NHD: Tensor,
) -> None:
    sequences, heads, g, d = metadata.num_decodes, q_NHD.shape[1], cache.kv_heads, cache.head_dim
    group = heads // g
    longest = min(metadata.max_seq_len, window or metadata.max_seq_len)
    splits = decode_splits(sequences, g, longest, q_NHD.device)
    partial, lse = out_NHD, metadata.seq_lens_P  # unused without splits
    if splits > 1:
        partial = torch.empty(sequences, heads, splits, d, dtype=torch.float32, device=q_NHD.device)
        lse = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q_NHD.device)
    _paged_decode[(sequences, g, splits)](
        q_NHD, cache.keys_BGLD, cache.values_BGDL, sinks_H, partial, lse,
        metadata.block_table_PM, metadata.seq_lens_P, metadata.cu_seqlens_P1,
        scale * LOG2_E * cache.key_scale, cache.value_scale, softcap or 0.0, window or 0,
        q_NHD.stride(0), metadata.block_table_PM.stride(0),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), G=g, D=d, L=cache.block_tokens, SPLITS=splits,
        COMPUTE=mma_dtype(cache.keys_BGLD.dtype), HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None,
        HAS_SINKS=sinks_H is not None, STAGES=decode_stages(cache), num_warps=2 if splits == 1 else 4,
        **pdl_options(sequences),
    )  # fmt: skip
    if splits > 1:
        _combine_splits[(sequences * heads,)](
            partial, lse, out_NHD, D=d, SPLITS=splits, num_warps=1, **pdl_options(sequences)
        )


def decode_splits(sequences: int, kv_heads: int, longest: int, device: torch.device) -> int:
    """Return the KV splits of decode, given the longest of its sequences."""
    return num_kv_splits(
        sequences, kv_heads, longest, scaled_to_sms(MAX_PROGRAMS, device), MIN_SPLIT_TOKENS, MAX_SPLITS
    )


def decode_stages(cache: KvCache) -> int:
    """Return the stages of decode: one tile of keys and values more than it holds at a time."""
    tile_bytes = 2 * cache.block_tokens * cache.head_dim * cache.keys_BGLD.element_size()
    return 3 if tile_bytes <= TWO_TILES else 2


def _prefill(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks_H: Tensor | None,
    fp8_prefills: bool,
    out_NHD: Tensor,
) -> None:
    # torch's attention has no window, and takes sizes from the host, which a CUDA graph does not have.
    windowed = window is not None and window < metadata.max_query_len
    has_sdpa = softcap is None and not windowed and q_NHD.is_cuda and not metadata.padded_prefills
    skip_from = LONG_CHUNK if has_sdpa else 2**30
    chunks = metadata.padded_prefills or len(metadata.prefill_chunks)
    start, longest = metadata.num_decodes, metadata.max_query_len if metadata.padded_prefills else 0
    for (context, count), equal in groupby(metadata.prefill_chunks):  # neighbours of one length are one batch
        end = start + count * len(list(equal))
        is_whole = context == 0 and count >= skip_from
        if is_whole and fp8_prefills and sinks_H is None and count >= MIN_TOKENS:
            rows_NW = _side_by_side(q_NHD, cache)[start:end]
            fp8_prefill(rows_NW, (end - start) // count, cache, scale, out_NHD[start:end])
        elif is_whole:
            q, k, v = (x[start:end].unflatten(0, (-1, count)) for x in (q_NHD, k_NGD, v_NGD))
            out_NHD[start:end] = _sdpa(q, k, v, scale) if sinks_H is None else _sink_attention(q, k, v, scale, sinks_H)
        else:
            longest = max(longest, count)
        start = end
    if longest:
        group = q_NHD.shape[1] // cache.kv_heads
        gpu = capabilities(q_NHD.device)
        tile, stages = prefill_tile(cache.head_dim, cache.block_tokens, q_NHD.element_size(), gpu)
        _paged_prefill[(triton.cdiv(longest, tile), q_NHD.shape[1], chunks)](
            q_NHD, k_NGD, v_NGD, cache.keys_BGLD, cache.values_BGDL, sinks_H, out_NHD,
            metadata.block_table_PM, metadata.seq_lens_P, metadata.cu_seqlens_P1,
            scale * LOG2_E, cache.key_scale, cache.value_scale, softcap or 0.0, window or 0,
            q_NHD.stride(0), metadata.block_table_PM.stride(0), metadata.num_decodes, skip_from,
            GROUP=group, G=cache.kv_heads, D=cache.head_dim, L=cache.block_tokens, TILE=tile,
            COMPUTE=mma_dtype(cache.keys_BGLD.dtype), HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None,
            HAS_SINKS=sinks_H is not None, STAGES=stages,
            num_warps=8,
        )  # fmt: skip


def prefill_tile(head_dim: int, block_tokens: int, itemsize: int, gpu: DeviceCapabilities) -> tuple[int, int]:
    """Return query tokens of a program and stages of its keys and values: the largest that fit the shared memory."""
    for tokens, stages in PREFILL_TILES:
        # Asynchronous matmuls (Hopper, Blackwell with tensor memory) read a stage more from shared memory. Others hold
        # keys and values in turn without a pipeline, and probabilities of wide heads for another layout.
        if (9, 0) <= (gpu.compute or (9, 0)) < (12, 0):
            tiles, probabilities = 2 * stages, 0
        else:
            tiles, probabilities = max(1, 2 * (stages - 1)), tokens * block_tokens if head_dim > 128 else 0
        tile_bytes = ((tokens + tiles * block_tokens) * head_dim + probabilities) * itemsize
        if gpu.shared_memory_bytes is None or tile_bytes <= gpu.shared_memory_bytes:
            return tokens, stages
    return PREFILL_TILES[-1]


def _side_by_side(q_NHD: Tensor, cache: KvCache) -> Tensor:
    """Return queries, keys and values of a token in one row, [N, W]: they are slices of one tensor."""
    width = (q_NHD.shape[1] + 2 * cache.kv_heads) * cache.head_dim
    return q_NHD.as_strided((len(q_NHD), width), (q_NHD.stride(0), 1))


def _sink_attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float, sinks_H: Tensor) -> Tensor:
    """The same with sinks, by the log-sum-exp, which `scaled_dot_product_attention` does not return."""
    tokens = q_BTHD.shape[1]
    segments = tuple(Segment(n * tokens, (n + 1) * tokens, 0, 0) for n in range(len(q_BTHD)))
    q, k, v = (x.flatten(0, 1).contiguous() for x in (q_BTHD, k_BTGD, v_BTGD))
    out_NHD, lse_HN = causal_forward(q, k, v, segments, scale)
    add_sinks_(out_NHD, lse_HN, sinks_H)
    return out_NHD


def _sdpa(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)
