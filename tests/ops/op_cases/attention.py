"""Attention over KV caches, MLA, softcap, and the merge of attention states."""

from dataclasses import replace

import torch
from torch import Generator, bfloat16, device, dtype, float8_e4m3fn, float32

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.decode_attention import decode_attention
from llmb.ops.attention.fp8_prefill import dequantize_output, quantize_qkv
from llmb.ops.attention.merge_lse import merge_attn_states
from llmb.ops.attention.mla_attention import MlaCache, mla_attention, mla_prefill_attention, mla_rope_and_cache
from llmb.ops.attention.paged_attention import HeadNorms, KvCache, paged_attention, rope_and_cache
from llmb.ops.softcap.softcap_attention import softcap_attention
from op_cases import Arguments, cases, full_size_cases, in_wider_rows, randn

E4M3 = float8_e4m3fn
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


def step(
    g: Generator, d: device, sequences: Sequences, blocks: int = BLOCKS, block_tokens: int = BLOCK_TOKENS,
    table: torch.Tensor | None = None,
) -> tuple[AttentionMetadata, torch.Tensor]:  # fmt: skip
    """Return the metadata and slot mapping of a step whose sequences have shuffled blocks, or those of a table."""
    lengths, counts = [first + count for first, count in sequences], [count for _, count in sequences]
    max_blocks = -(-max(lengths) // block_tokens)
    if table is None:
        table = torch.randperm(blocks, generator=g)[: len(sequences) * max_blocks].view(len(sequences), max_blocks)
    slots = [
        int(table[row, p // block_tokens]) * block_tokens + p % block_tokens
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


@cases(rope_and_cache, (5, True), (1, True), (7, False), (5, True, True), tolerance=1e-5, scratch=(0,))
def rope_cache(g: Generator, d: device, n: int, has_rope: bool, has_norms: bool = False) -> Arguments:
    qkv = randn(g, d, n, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    slots = torch.randperm(4 * BLOCK_TOKENS, generator=g)[:n].to(d)
    slots[n // 2] = -1
    norms = HeadNorms(randn(g, d, HEAD_DIM), randn(g, d, HEAD_DIM), 1e-5) if has_norms else None
    return (qkv, *(rope_tables(g, d, n, HEAD_DIM) if has_rope else (None, None)), kv_cache(g, d, 4), slots, norms), {}


@cases(
    paged_attention, *((s, cap) for s in (DECODES, PREFILLS, CONTINUED, MIXED) for cap in (None, 2.0)), tolerance=2e-5
)
@cases(paged_attention, (DECODES, None, 512), tolerance=2e-5)  # four KV splits
@cases(paged_attention, (MIXED, None, None, 9), (DECODES, 2.0, 512, 20), (PREFILLS, None, None, 17), tolerance=2e-5)
def paged(
    g: Generator, d: device, sequences: Sequences, softcap: float | None, max_seq_len: int | None = None,
    window: int | None = None,
) -> Arguments:  # fmt: skip
    metadata, slots = step(g, d, sequences)
    metadata = replace(metadata, max_seq_len=max_seq_len or metadata.max_seq_len)
    cache = kv_cache(g, d)
    qkv = randn(g, d, len(slots), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q, k, v = rope_and_cache.reference(qkv, None, None, cache, slots)
    return (q, k, v, cache, metadata, SCALE, softcap, window), {}


# Sequences, sliding window, longest sequence that a CUDA graph expects: it decides the KV splits.
@cases(
    paged_attention, (DECODES, None), (DECODES, 20, 512), (DECODES, None, 512), (MIXED, 9), (CONTINUED, None),
    tolerance=2e-5,
)  # fmt: skip
def paged_with_sinks(
    g: Generator, d: device, sequences: Sequences, window: int | None, max_seq_len: int | None = None
) -> Arguments:
    arguments, _ = paged(g, d, sequences, None, max_seq_len, window)
    return (*arguments, randn(g, d, HEADS, scale=2)), {}


# The heads of Llama 8b.
LLAMA_STEPS = (((700, 1), (0, 1), (64, 1)), ((0, 900), (0, 40)), ((100, 1), (130, 700), (0, 3)))


@full_size_cases(rope_and_cache, *((s, bfloat16) for s in LLAMA_STEPS), tolerance=1e-5, exact=float32, scratch=(0,))
@full_size_cases(rope_and_cache, *((s, E4M3) for s in LLAMA_STEPS), tolerance=0.03, exact=float32, scratch=(0,))
def llama_rope_cache(g: Generator, d: device, sequences: Sequences, kv_dtype: dtype) -> Arguments:
    (qkv, cache, slots), _ = _llama_step(g, d, sequences, kv_dtype)
    return (qkv, *rope_tables(g, d, len(slots), 128), cache, slots), {}


# The heads of Qwen3-30B-A3B. Normed heads are rounded to bf16 before RoPE, and a sum in another order may round them
# to the next number.
@full_size_cases(rope_and_cache, *((s, bfloat16) for s in LLAMA_STEPS), tolerance=0.005, exact=float32, scratch=(0,))
@full_size_cases(rope_and_cache, *((s, E4M3) for s in LLAMA_STEPS), tolerance=0.04, exact=float32, scratch=(0,))
def qwen3_rope_cache(g: Generator, d: device, sequences: Sequences, kv_dtype: dtype) -> Arguments:
    _, slots = step(g, d, sequences, blocks=64, block_tokens=64)
    cache = KvCache(randn(g, d, 64, 4, 64, 128, dtype=kv_dtype), randn(g, d, 64, 4, 128, 64, dtype=kv_dtype))
    qkv = randn(g, d, len(slots), 40 * 128, dtype=bfloat16)
    norms = HeadNorms(randn(g, d, 128, dtype=bfloat16), randn(g, d, 128, dtype=bfloat16), 1e-6)
    return (qkv, *rope_tables(g, d, len(slots), 128), cache, slots, norms), {}


# Prompts, tokens of one, with padding; scales of keys and values.
@cases(quantize_qkv, (1, 5, 8, 1.0, 1.0), (3, 4, 4, 0.5, 0.25), tolerance=1e-3)
def qkv_into_fp8(
    g: Generator, d: device, prompts: int, tokens: int, padded: int, key_scale: float, value_scale: float
) -> Arguments:
    rows = randn(g, d, prompts * tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM + 16)[:, :-16]
    return (rows, prompts, padded, KV_HEADS, HEAD_DIM, key_scale, value_scale), {}


@cases(dequantize_output, (1, 5, 8), (3, 4, 4), tolerance=1e-6)
def output_out_of_fp8(g: Generator, d: device, prompts: int, tokens: int, padded: int) -> Arguments:
    out = randn(g, d, prompts, padded, HEADS * HEAD_DIM, dtype=E4M3)
    return (out, torch.tensor([1.7], device=d), tokens, randn(g, d, prompts * tokens, HEADS, HEAD_DIM)), {}


# Prefill chunks use their own keys and values unrounded: fp8 caches differ more.
@full_size_cases(paged_attention, *((s, bfloat16) for s in LLAMA_STEPS), tolerance=0.01, exact=float32)
@full_size_cases(paged_attention, *((s, E4M3) for s in LLAMA_STEPS), tolerance=0.05, exact=float32)
def llama_paged(g: Generator, d: device, sequences: Sequences, kv_dtype: dtype) -> Arguments:
    (qkv, cache, slots), metadata = _llama_step(g, d, sequences, kv_dtype)
    return (*rope_and_cache.reference(qkv, None, None, cache, slots), cache, metadata, 128**-0.5), {}


def _llama_step(
    g: Generator, d: device, sequences: Sequences, kv_dtype: dtype
) -> tuple[tuple[torch.Tensor, KvCache, torch.Tensor], AttentionMetadata]:
    metadata, slots = step(g, d, sequences, blocks=64, block_tokens=64)
    cache = KvCache(randn(g, d, 64, 8, 64, 128, dtype=kv_dtype), randn(g, d, 64, 8, 128, 64, dtype=kv_dtype))
    return (randn(g, d, len(slots), 48 * 128, dtype=bfloat16), cache, slots), metadata


LONG_DECODES: Sequences = ((149, 1), (0, 1), (16, 1), (96, 1))


# The longest sequence that a CUDA graph expects decides the KV splits: 4, and 8, more than most sequences have blocks.
@cases(
    decode_attention, (DECODES, True, None), (DECODES, False, 2.0),
    (LONG_DECODES, True, 2.0, 256, 0.5, 6), (LONG_DECODES, False, None, 512),
    (LONG_DECODES, True, None, 512, 1.0, HEADS, 40), (DECODES, False, None, 64, 1.0, HEADS, 1),
    tolerance=5e-3 if torch.cuda.is_available() else 2e-5,  # on a GPU its products are in tf32
)  # fmt: skip
def decode(
    g: Generator, d: device, sequences: Sequences, has_rope: bool, softcap: float | None,
    max_seq_len: int = 64, key_scale: float = 1.0, heads: int = HEADS, window: int | None = None,
) -> Arguments:  # fmt: skip
    metadata, slots = step(g, d, sequences, blocks=48)
    qkv = randn(g, d, len(slots), (heads + 2 * KV_HEADS) * HEAD_DIM)
    table = rope_tables(g, d, len(slots), HEAD_DIM) if has_rope else (None, None)
    cache = replace(kv_cache(g, d, 48), key_scale=key_scale, value_scale=1 / key_scale)
    return (qkv, *table, cache, slots, replace(metadata, max_seq_len=max_seq_len), SCALE, softcap, window), {}


@cases(
    decode_attention, (DECODES, 64, None), (LONG_DECODES, 512, None), (LONG_DECODES, 512, 40),
    tolerance=5e-3 if torch.cuda.is_available() else 2e-5,
)  # fmt: skip
def decode_with_sinks(g: Generator, d: device, sequences: Sequences, max_seq_len: int, window: int | None) -> Arguments:
    arguments, _ = decode(g, d, sequences, True, None, max_seq_len, window=window)
    return (*arguments, randn(g, d, HEADS, scale=2)), {}


@cases(merge_attn_states, (13, 6, 16), (8, 4, 24), tolerance=1e-5)
@cases(merge_attn_states, (13, 6, 16, bfloat16), (8, 4, 24, bfloat16), tolerance=2**-7)
def merge(g: Generator, d: device, n: int, heads: int, width: int, dtype: dtype = float32) -> Arguments:
    out = randn(g, d, n + 2, heads + 1, width, dtype=dtype)[1:-1, :heads]
    lse = in_wider_rows(randn(g, d, heads, n, scale=3))
    return (out, lse, randn(g, d, n, heads, width, dtype=dtype), randn(g, d, heads, n, scale=3)), {}


def mla_cache(g: Generator, d: device, blocks: int = BLOCKS) -> MlaCache:
    return MlaCache(randn(g, d, blocks, BLOCK_TOKENS, RANK), randn(g, d, blocks, BLOCK_TOKENS, ROPE))


@cases(mla_rope_and_cache, (5, 19), (1, 3), (5, 3, E4M3), (5, 3, E4M3, 0.5), tolerance=2e-5)
def mla_write(g: Generator, d: device, n: int, heads: int, kv_dtype: dtype = float32, scale: float = 1.0) -> Arguments:
    q, norm = randn(g, d, n, heads, 4 + ROPE), randn(g, d, RANK)
    _, latent, key = randn(g, d, n, 3 + RANK + ROPE).split((3, RANK, ROPE), dim=-1)
    if kv_dtype == E4M3:
        norm[0] = 1e4  # beyond what it holds
    slots = torch.randperm(3 * BLOCK_TOKENS, generator=g)[:n].to(d)
    slots[n // 2] = -1
    cache = mla_cache(g, d, 3)
    cache = replace(cache, latents_BLR=cache.latents_BLR.to(kv_dtype), scale=scale)
    return (q, latent, key, norm, 1e-6, *rope_tables(g, d, n, ROPE), cache, slots), {}


@cases(mla_attention, (DECODES, 24), (MIXED, 8), (CONTINUED, 3), (((0, 5), (3, 9)), 3), tolerance=2e-5)
def mla_absorbed(g: Generator, d: device, sequences: Sequences, heads: int) -> Arguments:
    metadata, slots = step(g, d, sequences)
    q_latent, q_rope = (randn(g, d, len(slots), heads, width) for width in (RANK, ROPE))
    return (q_latent, q_rope, mla_cache(g, d), metadata, 0.3), {}


def mla_metadata(
    g: Generator, d: device, sequences: list[tuple[int, int]], max_seq_len: int | None, block_tokens: int
) -> AttentionMetadata:
    """Return metadata of (tokens, length) of each sequence; padding has a length of 0."""
    counts, lengths = zip(*sequences, strict=True)
    max_blocks = max(1, -(-max(lengths) // block_tokens))
    return AttentionMetadata(
        cu_seqlens_P1=torch.tensor([0, *counts]).cumsum(0).int().to(d),
        seq_lens_P=torch.tensor(lengths).int().to(d),
        block_table_PM=torch.randperm(len(sequences) * max_blocks, generator=g).view(-1, max_blocks).int().to(d),
        num_decodes=0,
        max_query_len=max(counts),
        max_seq_len=max_seq_len or max(lengths),
    )


PADDED_DECODES = [(1, 80), (1, 1), (1, 0), (1, 16), (1, 33), (0, 0)]


@cases(mla_attention, (PADDED_DECODES, 24, 80), (PADDED_DECODES, 24, 4096), tolerance=2e-5)
@cases(mla_attention, ([(1, 37), (4, 20)], 4, None, E4M3, 0.25, 48), tolerance=2e-5)
def mla_padded(
    g: Generator, d: device, sequences: list[tuple[int, int]], heads: int, max_seq_len: int | None,
    kv_dtype: dtype = float32, scale: float = 1.0, block_tokens: int = BLOCK_TOKENS,
) -> Arguments:  # fmt: skip
    metadata = mla_metadata(g, d, sequences, max_seq_len, block_tokens)
    blocks, tokens = metadata.block_table_PM.numel(), sum(count for count, _ in sequences)
    latents, keys = randn(g, d, blocks, block_tokens, RANK, dtype=kv_dtype), randn(g, d, blocks, block_tokens, ROPE)
    q_latent, q_rope = randn(g, d, heads, tokens, RANK).transpose(0, 1), randn(g, d, tokens, heads, ROPE + 3)[..., 3:]
    return (q_latent, q_rope, MlaCache(latents, keys, scale), metadata, 0.3), {}


@cases(mla_attention, tolerance=2e-5)
def mla_never_reads_beyond_a_sequence(g: Generator, d: device) -> Arguments:
    metadata, cache = mla_metadata(g, d, [(1, 21), (2, 5)], None, BLOCK_TOKENS), mla_cache(g, d, 4)
    metadata.block_table_PM.copy_(torch.tensor([[2, 0], [3, 10**8]]))
    cache.latents_BLR[0, 5:], cache.keys_BLK[3, 5:], cache.latents_BLR[1] = torch.nan, torch.nan, torch.nan
    return (randn(g, d, 3, 4, RANK), randn(g, d, 3, 4, ROPE), cache, metadata, 0.3), {}


@cases(mla_prefill_attention, (1, 1), (5, 5), (33, 70), (64, 65), (40, 200), tolerance=2e-5)
def mla_prefill(g: Generator, d: device, count: int, length: int) -> Arguments:
    nope, value, heads = 24, 20, 3
    q, kv = randn(g, d, count, heads, nope + ROPE), randn(g, d, length, heads, nope + value)
    return (q, kv, randn(g, d, length, ROPE), 0.3), {}


# DeepSeek-V3: tokens and length of each sequence (0: padding), and the longest that a CUDA graph expects.
DEEPSEEK_STEPS: dict[str, tuple[list[tuple[int, int]], int | None]] = {
    "one": ([(1, 1000)], None),
    "one in a graph": ([(1, 1000)], 32768),
    "padded decodes": ([(1, 100 + 37 * n) for n in range(64)] + [(1, 0)] * 3, None),
    "many decodes": ([(1, 4096)] * 300, None),
    "chunks": ([(5, 700), (1, 64), (130, 1130)], None),
}


@full_size_cases(
    mla_attention,
    *((name, heads, kv_dtype) for name in DEEPSEEK_STEPS for heads in (128, 16) for kv_dtype in (bfloat16, E4M3)),
    tolerance=0.01,
    exact=float32,
)
def deepseek_absorbed(g: Generator, d: device, name: str, heads: int, kv_dtype: dtype) -> Arguments:
    metadata = mla_metadata(g, d, *DEEPSEEK_STEPS[name], block_tokens=64)
    blocks, tokens = metadata.block_table_PM.numel(), sum(count for count, _ in DEEPSEEK_STEPS[name][0])
    cache = MlaCache(randn(g, d, blocks, 64, 512, dtype=kv_dtype), randn(g, d, blocks, 64, 64, dtype=bfloat16))
    q_latent = randn(g, d, heads, tokens, 512, dtype=bfloat16).transpose(0, 1)  # strided as in the mixer
    return (q_latent, randn(g, d, tokens, heads, 192, dtype=bfloat16)[..., 128:], cache, metadata, 192**-0.5), {}


@full_size_cases(mla_prefill_attention, (256, 300), (1000, 5000), (77, 8192), tolerance=0.01, exact=float32)
def deepseek_prefill(g: Generator, d: device, count: int, length: int) -> Arguments:
    shapes = ((count, 16, 192), (length, 16, 256), (length, 64))
    return (*(randn(g, d, *shape, dtype=bfloat16) for shape in shapes), 192**-0.5), {}


@full_size_cases(mla_rope_and_cache, (bfloat16,), tolerance=0.005, exact=None)
@full_size_cases(mla_rope_and_cache, (E4M3,), tolerance=0.03, exact=None)
def deepseek_write(g: Generator, d: device, kv_dtype: dtype) -> Arguments:
    q, down = randn(g, d, 37, 128, 192, dtype=bfloat16), randn(g, d, 37, 1536 + 512 + 64, dtype=bfloat16)
    _, latent, key = down.split((1536, 512, 64), dim=-1)
    norm = randn(g, d, 512, dtype=bfloat16, scale=100)  # beyond what e4m3 holds
    cache = MlaCache(torch.zeros(3, 64, 512, device=d).to(kv_dtype), torch.zeros(3, 64, 64, device=d).bfloat16())
    slots = torch.randperm(192, generator=g)[:37].to(d)
    slots[5] = -1
    return (q, latent, key, norm, 1e-6, *rope_tables(g, d, 37, 64), cache, slots), {}


# Logits of the reference are in bf16.
@cases(softcap_attention, (2, 31, 31, 1), (1, 70, 70, 4), (1, 17, 70, 2), tolerance=0.05)
@cases(softcap_attention, (1, 70, 70, 2, 9), (1, 17, 70, 1, 40), (2, 31, 31, 4, 99), tolerance=0.05)
@cases(softcap_attention, (1, 40, 70, 2, 50, 256), tolerance=0.05)
def softcapped(
    g: Generator, d: device, batch: int, queries: int, keys: int, kv_heads: int, window: int | None = None,
    head_dim: int = 16,
) -> Arguments:  # fmt: skip
    shapes = ((HEADS, queries), (kv_heads, keys), (kv_heads, keys))
    qkv = (randn(g, d, batch, *shape, head_dim, dtype=bfloat16, scale=3).requires_grad_() for shape in shapes)
    return (*qkv, 1.6 * head_dim**-0.5, 30.0, window), {}


@full_size_cases(
    softcap_attention,
    *((2048, 2048, 48, 8, 128), (333, 333, 4, 4, 64), (100, 777, 6, 1, 128), (1, 50, 4, 2, 32)),
    *((2048, 2048, 16, 8, 256), (2048, 2048, 16, 8, 256, 700), (333, 1000, 16, 8, 256, 20), (500, 777, 6, 1, 128, 300)),
    tolerance=0.02,
    exact=float32,
)
def grok_gemma_softcapped(
    g: Generator, d: device, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int,
    window: int | None = None,
) -> Arguments:  # fmt: skip
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    qkv = (
        randn(g, d, 2, *shape, head_dim, dtype=bfloat16, scale=6).transpose(1, 2).requires_grad_() for shape in shapes
    )
    return (*qkv, head_dim**-0.5, 30.0, window), {}
