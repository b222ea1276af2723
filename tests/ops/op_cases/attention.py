"""Attention over KV caches, MLA, softcap, and the merge of attention states."""

import torch
from torch import Generator, bfloat16, device, dtype, float32

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.decode_attention import decode_attention
from llmb.ops.attention.merge_lse import merge_attn_states
from llmb.ops.attention.mla_attention import MlaCache, mla_attention, mla_prefill_attention, mla_rope_and_cache
from llmb.ops.attention.paged_attention import KvCache, paged_attention, rope_and_cache
from llmb.ops.attention.softcap_attention import softcap_attention
from op_cases import Arguments, cases, randn

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, BLOCKS = 4, 2, 16, 16, 24
SCALE = HEAD_DIM**-0.5
RANK, ROPE = 20, 8
Sequences = tuple[tuple[int, int], ...]  # (first position, tokens), decodes first
DECODES: Sequences = ((20, 1), (0, 1), (15, 1), (47, 1))
PREFILLS: Sequences = ((0, 40), (0, 5))
CONTINUED: Sequences = ((17, 12), (32, 3))
MIXED: Sequences = ((20, 1), (33, 1), (0, 7), (16, 20))


def kv_cache(g: Generator, d: device, blocks: int = BLOCKS) -> KvCache:
    shapes = ((blocks, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), (blocks, KV_HEADS, HEAD_DIM, BLOCK_TOKENS))
    return KvCache(*(randn(g, d, *shape) for shape in shapes))


def step(g: Generator, d: device, sequences: Sequences) -> tuple[AttentionMetadata, torch.Tensor]:
    """Return the metadata and slot mapping of a step whose sequences have shuffled blocks."""
    lengths, counts = [first + count for first, count in sequences], [count for _, count in sequences]
    max_blocks = -(-max(lengths) // BLOCK_TOKENS)
    table = torch.randperm(BLOCKS, generator=g)[: len(sequences) * max_blocks].view(len(sequences), max_blocks)
    slots = [
        int(table[row, p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS
        for row, (first, count) in enumerate(sequences)
        for p in range(first, first + count)
    ]
    decodes = sum(count == 1 for count in counts)
    metadata = AttentionMetadata(
        cu_seqlens_P1=torch.tensor([0, *counts]).cumsum(0).int().to(d),
        seq_lens_P=torch.tensor(lengths).int().to(d),
        block_table_PM=table.int().to(d),
        num_decodes=decodes,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        prefill_chunks=sequences[decodes:],
    )
    return metadata, torch.tensor(slots, device=d)


def rope_tables(g: Generator, d: device, tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = randn(g, d, tokens, width // 2)
    return angles.cos(), angles.sin()


@cases(rope_and_cache, (5, True), (1, True), (7, False), tolerance=1e-5, scratch=(0,))
def rope_cache(g: Generator, d: device, n: int, has_rope: bool) -> Arguments:
    qkv = randn(g, d, n, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    slots = torch.randperm(4 * BLOCK_TOKENS, generator=g)[:n].to(d)
    slots[n // 2] = -1
    return (qkv, *(rope_tables(g, d, n, HEAD_DIM) if has_rope else (None, None)), kv_cache(g, d, 4), slots), {}


@cases(
    paged_attention, *((s, cap) for s in (DECODES, PREFILLS, CONTINUED, MIXED) for cap in (None, 2.0)), tolerance=2e-5
)
def paged(g: Generator, d: device, sequences: Sequences, softcap: float | None) -> Arguments:
    metadata, slots = step(g, d, sequences)
    cache = kv_cache(g, d)
    qkv = randn(g, d, len(slots), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q, k, v = rope_and_cache.reference(qkv, None, None, cache, slots)
    return (q, k, v, cache, metadata, SCALE, softcap), {}


@cases(
    decode_attention, (True, None), (False, 2.0),
    tolerance=5e-3 if torch.cuda.is_available() else 2e-5,  # on a GPU its products are in tf32
)  # fmt: skip
def decode(g: Generator, d: device, has_rope: bool, softcap: float | None) -> Arguments:
    metadata, slots = step(g, d, DECODES)
    qkv = randn(g, d, len(slots), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    table = rope_tables(g, d, len(slots), HEAD_DIM) if has_rope else (None, None)
    return (qkv, *table, kv_cache(g, d), slots, metadata, SCALE, softcap), {}


@cases(merge_attn_states, (13, 6, 16), (8, 4, 24), tolerance=1e-5)
@cases(merge_attn_states, (13, 6, 16, bfloat16), (8, 4, 24, bfloat16), tolerance=2**-7)
def merge(g: Generator, d: device, n: int, heads: int, width: int, dtype: dtype = float32) -> Arguments:
    out, lse = randn(g, d, n, heads, width, dtype=dtype), randn(g, d, heads, n, scale=3)
    return (out, lse, randn(g, d, n, heads, width, dtype=dtype), randn(g, d, heads, n, scale=3)), {}


def mla_cache(g: Generator, d: device, blocks: int = BLOCKS) -> MlaCache:
    return MlaCache(randn(g, d, blocks, BLOCK_TOKENS, RANK), randn(g, d, blocks, BLOCK_TOKENS, ROPE))


@cases(mla_rope_and_cache, (5, 19), (1, 3), tolerance=2e-5)
def mla_write(g: Generator, d: device, n: int, heads: int) -> Arguments:
    q, latent, key = randn(g, d, n, heads, 4 + ROPE), randn(g, d, n, RANK), randn(g, d, n, ROPE)
    slots = torch.randperm(3 * BLOCK_TOKENS, generator=g)[:n].to(d)
    slots[n // 2] = -1
    return (q, latent, key, randn(g, d, RANK), 1e-6, *rope_tables(g, d, n, ROPE), mla_cache(g, d, 3), slots), {}


@cases(mla_attention, (DECODES, 24), (MIXED, 8), (CONTINUED, 3), tolerance=2e-5)
def mla_absorbed(g: Generator, d: device, sequences: Sequences, heads: int) -> Arguments:
    metadata, slots = step(g, d, sequences)
    q_latent, q_rope = (randn(g, d, len(slots), heads, width) for width in (RANK, ROPE))
    return (q_latent, q_rope, mla_cache(g, d), metadata, 0.3), {}


@cases(mla_prefill_attention, (1, 1), (5, 5), (33, 70), (64, 65), (40, 200), tolerance=2e-5)
def mla_prefill(g: Generator, d: device, count: int, length: int) -> Arguments:
    nope, value, heads = 24, 20, 3
    q, kv = randn(g, d, count, heads, nope + ROPE), randn(g, d, length, heads, nope + value)
    return (q, kv, randn(g, d, length, ROPE), 0.3), {}


@cases(softcap_attention, (31, 31, 1), (70, 70, 4), (17, 70, 2), tolerance=0.05)  # logits of the reference are in bf16
def softcapped(g: Generator, d: device, queries: int, keys: int, kv_heads: int) -> Arguments:
    shapes = ((HEADS, queries), (kv_heads, keys), (kv_heads, keys))
    qkv = (randn(g, d, 2, *shape, 16, dtype=bfloat16, scale=3).requires_grad_() for shape in shapes)
    return (*qkv, 0.4, 30.0), {}
