"""Decode attention: padding, fp8 caches and the number of KV splits; numbers: op_cases/attention.py."""

import pytest
import torch
from torch import Tensor

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.decode_attention import decode_attention
from llmb.ops.attention.decode_attention_triton import MAX_PROGRAMS, MAX_SPLITS, MIN_SPLIT_TOKENS, _arrival_counters
from llmb.ops.attention.online_softmax_triton import num_kv_splits
from llmb.ops.attention.paged_attention import KvCache

E4M3 = torch.float8_e4m3fn


def randn(device: torch.device, *shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


HEADS, KV_HEADS, WIDTH, BLOCK_TOKENS = 6, 2, 16, 16  # the last: tokens of a block
MAX_SEQ_LEN = 150


def caches(device: torch.device, dtype: torch.dtype, scales: tuple[float, float], seed: int) -> tuple[KvCache, KvCache]:
    """Return two equal caches, full of older tokens."""
    shapes = ((48, KV_HEADS, BLOCK_TOKENS, WIDTH), (48, KV_HEADS, WIDTH, BLOCK_TOKENS))
    contents = [randn(device, *shape, seed=seed + index).to(dtype) for index, shape in enumerate(shapes)]
    first, second = (KvCache(*(x.clone() for x in contents), *scales) for _ in range(2))
    return first, second


def tensors_of(cache: KvCache) -> tuple[Tensor, Tensor]:
    return cache.keys_BGLD, cache.values_BGDL


def decode_metadata(lengths: list[int], device: torch.device) -> tuple[AttentionMetadata, Tensor]:
    """Return metadata and slots of decodes; sequence i has blocks from 10 i, one of length 0 (padding) none."""
    n, max_blocks = len(lengths), -(-MAX_SEQ_LEN // BLOCK_TOKENS)
    table = torch.arange(max_blocks, dtype=torch.int32) + 10 * torch.arange(n, dtype=torch.int32)[:, None]
    slots = [
        int(table[i, (m - 1) // BLOCK_TOKENS]) * BLOCK_TOKENS + (m - 1) % BLOCK_TOKENS if m else -1
        for i, m in enumerate(lengths)
    ]
    table[[m == 0 for m in lengths]] = 10**6
    metadata = AttentionMetadata(
        cu_seqlens_P1=torch.arange(n + 1, dtype=torch.int32, device=device),
        seq_lens_P=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table_PM=table.to(device),
        num_decodes=n,
        max_query_len=1,
        max_seq_len=MAX_SEQ_LEN,
    )
    return metadata, torch.tensor(slots, device=device)


def test_padding_neither_reads_nor_writes(device: torch.device) -> None:
    metadata, slots = decode_metadata([150, 0, 97], device)
    qkv = randn(device, 3, (HEADS + 2 * KV_HEADS) * WIDTH, seed=1)
    reference_cache, cache = caches(device, torch.float32, (1.0, 1.0), seed=2)
    expected = decode_attention.reference(qkv.clone(), None, None, reference_cache, slots, metadata, 0.25, None)
    actual = decode_attention.triton(qkv, None, None, cache, slots, metadata, 0.25, None)
    # A compiled kernel multiplies queries and keys in tf32: rounding both changed these outputs by 1.4e-3 at most.
    rtol, atol = (0.0, 5e-3) if device.type == "cuda" else (1e-4, 1e-5)
    torch.testing.assert_close(actual[[0, 2]], expected[[0, 2]], rtol=rtol, atol=atol)
    for actual_cache, expected_cache in zip(tensors_of(cache), tensors_of(reference_cache), strict=True):
        torch.testing.assert_close(actual_cache, expected_cache)
    assert not _arrival_counters(qkv.device, 3 * KV_HEADS).any(), "ready for the next kernel"


def test_fp8_cache_quantizes_older_tokens_only(device: torch.device) -> None:
    metadata, slots = decode_metadata([40, 1], device)
    qkv = randn(device, 2, (HEADS + 2 * KV_HEADS) * WIDTH, seed=1)
    reference_cache, cache = caches(device, E4M3, (0.5, 0.25), seed=2)
    exact, _ = caches(device, torch.float32, (1.0, 1.0), seed=2)
    exact.keys_BGLD.copy_(reference_cache.keys_BGLD.float() * 0.5)
    exact.values_BGDL.copy_(reference_cache.values_BGDL.float() * 0.25)
    expected = decode_attention.reference(qkv.clone(), None, None, exact, slots, metadata, 0.25, None)
    actual = decode_attention.triton(qkv.clone(), None, None, cache, slots, metadata, 0.25, None)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)  # GEMMs are in fp16
    decode_attention.reference(qkv, None, None, reference_cache, slots, metadata, 0.25, None)
    for actual_cache, expected_cache in zip(tensors_of(cache), tensors_of(reference_cache), strict=True):
        differ = actual_cache.float() != expected_cache.float()
        assert differ.float().mean() < 0.01  # the interpreter loses carries in rounding


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "max_seq_len", "splits"),
    [(1, 8, 2048, 32), (4, 8, 2048, 32), (1, 8, 40, 1), (1, 1, 100_000, 64), (4, 128, 2048, 2)],
)
def test_kv_splits_fill_the_gpu_but_have_enough_tokens(
    sequences: int, kv_heads: int, max_seq_len: int, splits: int
) -> None:
    assert num_kv_splits(sequences, kv_heads, max_seq_len, MAX_PROGRAMS, MIN_SPLIT_TOKENS, MAX_SPLITS) == splits
