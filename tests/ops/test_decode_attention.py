"""Decode attention: padding, fp8 caches and the number of KV splits; numbers: op_cases/attention.py."""

import pytest
import torch
from op_cases.attention import E4M3, KV_HEADS, decode, kv_cache
from torch import Generator, Tensor

from llmb.ops.attention.decode_attention import decode_attention
from llmb.ops.attention.decode_attention_triton import MAX_PROGRAMS, MAX_SPLITS, MIN_SPLIT_TOKENS, _arrival_counters
from llmb.ops.attention.online_softmax_triton import num_kv_splits
from llmb.ops.attention.paged_attention import KvCache


def tensors_of(cache: KvCache) -> tuple[Tensor, Tensor]:
    return cache.keys_BGLD, cache.values_BGDL


def test_padding_neither_reads_nor_writes(device: torch.device) -> None:
    results, caches = [], []
    for kernel in (decode_attention.reference, decode_attention.triton):
        arguments, _ = decode(Generator().manual_seed(0), device, ((149, 1), (30, 1), (96, 1)), True, None, 1024)
        _, _, _, cache, slots, metadata, *_ = arguments
        metadata.seq_lens_P[1], metadata.block_table_PM[1], slots[1] = 0, 10**6, -1
        results.append(kernel(*arguments)[[0, 2]])
        caches.append(tensors_of(cache))
    # A compiled kernel multiplies queries and keys in tf32: rounding both changed these outputs by 1.4e-3 at most.
    rtol, atol = (0.0, 5e-3) if device.type == "cuda" else (1e-4, 1e-5)
    torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(caches[1], caches[0])
    assert not _arrival_counters(device, 3 * KV_HEADS).any(), "ready for the next kernel"


def test_fp8_cache_quantizes_older_tokens_only(device: torch.device) -> None:
    (qkv, *table, _, slots, metadata, scale, _, _), _ = decode(Generator(), device, ((39, 1), (0, 1)), False, None)
    contents = [x.to(E4M3) for x in tensors_of(kv_cache(Generator(), device, 48))]
    reference_cache, cache = (KvCache(*(x.clone() for x in contents), 0.5, 0.25) for _ in range(2))
    exact = KvCache(contents[0].float() * 0.5, contents[1].float() * 0.25)
    expected = decode_attention.reference(qkv.clone(), *table, exact, slots, metadata, scale, None)
    actual = decode_attention.triton(qkv.clone(), *table, cache, slots, metadata, scale, None)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)  # GEMMs are in fp16
    decode_attention.reference(qkv, *table, reference_cache, slots, metadata, scale, None)
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


def test_blocks_before_the_window_are_never_read(device: torch.device) -> None:
    sequences, window = ((149, 1), (96, 1)), 20
    arguments, _ = decode(Generator().manual_seed(0), device, sequences, True, None, 512, window=window)
    _, _, _, cache, _, metadata, *_ = arguments
    for row, (first, _) in enumerate(sequences):
        freed = metadata.block_table_PM[row, : (first - window + 1) // cache.block_tokens].long()
        cache.keys_BGLD[freed], cache.values_BGDL[freed] = float("nan"), float("nan")
    assert decode_attention.triton(*arguments).isfinite().all()
