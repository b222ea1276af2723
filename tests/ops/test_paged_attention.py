"""Paged attention: any split of sequences into steps and blocks equals plain attention; the Triton kernels."""

import pytest
import torch
from torch import Tensor

from llmb.models.blocks import causal_attention
from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.online_softmax_triton import num_kv_splits
from llmb.ops.attention.paged_attention import KvCache, paged_attention, rope_and_cache
from llmb.ops.attention.paged_attention_triton import MAX_PROGRAMS, MAX_SPLITS

HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 16, 16  # the last: of a block
SCALE = WIDTH**-0.5
CPU = torch.device("cpu")


def empty_cache(
    blocks: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, device: torch.device = CPU
) -> KvCache:
    shapes = ((blocks, KV_HEADS, TOKENS, WIDTH), (blocks, KV_HEADS, WIDTH, TOKENS))
    return KvCache(*(torch.full(shape, 7.0, device=device).to(dtype) for shape in shapes), scale, scale)


def step_metadata(
    sequences: list[tuple[int, int, list[int]]], device: torch.device = CPU
) -> tuple[AttentionMetadata, Tensor]:
    """Return metadata and slot mapping of sequences given as (first position, tokens, blocks), decodes first."""
    decodes = sum(count == 1 for _, count, _ in sequences)
    table = torch.full((len(sequences), max(len(blocks) for *_, blocks in sequences)), 99, dtype=torch.int32)
    slots, starts = [], [0]
    for row, (first, count, blocks) in enumerate(sequences):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots += [blocks[p // TOKENS] * TOKENS + p % TOKENS for p in range(first, first + count)]
        starts.append(starts[-1] + count)
    lengths = [first + count for first, count, _ in sequences]
    metadata = AttentionMetadata(
        cu_seqlens_P1=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens_P=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table_PM=table.to(device),
        num_decodes=decodes,
        max_query_len=max(count for _, count, _ in sequences),
        max_seq_len=max(lengths),
        prefill_chunks=tuple((first, count) for first, count, _ in sequences[decodes:]),
    )
    return metadata, torch.tensor(slots, device=device)


def random_qkv(tokens: int, seed: int) -> Tensor:
    width = (HEADS + 2 * KV_HEADS) * WIDTH
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    table = positions[:, None] * torch.linspace(1.0, 0.01, WIDTH // 2)
    return table.cos(), table.sin()


def run_in_steps(steps: list[int], blocks: list[int], cache: KvCache, qkv: Tensor, softcap: float | None) -> Tensor:
    """Run a sequence through the cache in steps of so many tokens."""
    out, first = [], 0
    for count in steps:
        metadata, slots = step_metadata([(first, count, blocks)])
        rows = qkv[first : first + count].clone()
        cos, sin = angles(torch.arange(first, first + count))
        q, k, v = rope_and_cache.reference(rows, cos, sin, cache, slots)
        out.append(paged_attention.reference(q, k, v, cache, metadata, SCALE, softcap))
        first += count
    return torch.cat(out)


@pytest.mark.parametrize("steps", [[40], [1] * 40, [17, 1, 1, 21], [16, 16, 8]])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_any_split_into_steps_equals_plain_attention(steps, softcap):
    qkv = random_qkv(40, seed=1)
    stepped = run_in_steps(steps, [5, 0, 3], empty_cache(6), qkv, softcap)
    _, slots = step_metadata([(0, 40, [0, 1, 2])])
    q, k, v = rope_and_cache.reference(qkv, *angles(torch.arange(40)), empty_cache(3), slots)
    plain = causal_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), softcap=softcap)[0].transpose(0, 1)
    torch.testing.assert_close(stepped, plain, rtol=1e-4, atol=1e-5)


def test_kv_splits_of_a_long_sequence_are_combined(monkeypatch, device):
    monkeypatch.setattr("llmb.ops.attention.paged_attention_triton.MIN_SPLIT_TOKENS", 8)
    metadata, _ = step_metadata([(50, 1, [4, 1, 2, 0]), (3, 1, [3])], device)
    assert num_kv_splits(2, KV_HEADS, metadata.max_seq_len, MAX_PROGRAMS, 8, MAX_SPLITS) == 4
    cache = empty_cache(6, device=device)
    for seed, tensor in ((4, cache.keys_BGLD), (5, cache.values_BGDL)):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    q = random_qkv(2, seed=6).to(device).unflatten(-1, (-1, WIDTH))[:, :HEADS]
    expected = paged_attention.reference(q, q, q, cache, metadata, SCALE)
    torch.testing.assert_close(paged_attention.triton(q, q, q, cache, metadata, SCALE, None), expected)


def test_padding_neither_reads_nor_writes(device):
    """A padded decode: slot -1, length 0, a block table without valid blocks."""
    metadata, _ = step_metadata([(20, 1, [4, 1]), (0, 1, [0])], device)
    metadata.seq_lens_P[1] = 0
    metadata.block_table_PM[1] = 10**6
    cache = empty_cache(6, device=device)
    before = cache.keys_BGLD.clone(), cache.values_BGDL.clone()
    q, k, v = rope_and_cache.triton(
        random_qkv(2, 7).to(device), None, None, cache, torch.tensor([-1, -1], device=device)
    )
    paged_attention.triton(q, k, v, cache, metadata, SCALE, None)
    torch.testing.assert_close((cache.keys_BGLD, cache.values_BGDL), before)


def test_fp8_cache_is_quantized_with_its_scale():
    metadata, slots = step_metadata([(0, 20, [1, 0])])
    cache = empty_cache(2, torch.float8_e4m3fn, scale=0.5)
    qkv = random_qkv(20, seed=8)
    q, k, v = rope_and_cache.reference(qkv, None, None, cache, slots)
    quantized = [(x * 2).to(torch.float8_e4m3fn).float() / 2 for x in (k, v)]
    plain = causal_attention(*(x.transpose(0, 1)[None] for x in (q, *quantized)))[0].transpose(0, 1)
    torch.testing.assert_close(paged_attention.reference(q, k, v, cache, metadata, SCALE), plain, rtol=1e-4, atol=1e-5)
