"""Paged attention: any cut of sequences into steps and blocks is plain attention; Triton does what plain torch does."""

import pytest
import torch
from torch import Tensor

from llmb.models.blocks import causal_attention
from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.attention.kv_cache_write_triton import rotate_and_cache_triton
from llmb.ops.attention.online_softmax_triton import shares_of
from llmb.ops.attention.paged_attention import (
    KvCache,
    paged_attention_reference,
    rotate_and_cache_reference,
)
from llmb.ops.attention.paged_attention_triton import FULL_GPU, MOST_SHARES, paged_attention_triton

HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 16, 16  # the last: of a block
SCALE = WIDTH**-0.5


def empty_cache(blocks: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> KvCache:
    shapes = ((blocks, KV_HEADS, TOKENS, WIDTH), (blocks, KV_HEADS, WIDTH, TOKENS))
    return KvCache(*(torch.full(shape, 7.0).to(dtype) for shape in shapes), scale, scale)


def step_of(parts: list[tuple[int, int, list[int]]]) -> tuple[Spans, Tensor]:
    """Parts as (first position, tokens, blocks); those of one token first. The spans, and each token's place."""
    decodes = sum(count == 1 for _, count, _ in parts)
    table = torch.full((len(parts), max(len(blocks) for *_, blocks in parts)), 99, dtype=torch.int32)
    places, starts = [], [0]
    for row, (first, count, blocks) in enumerate(parts):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        places += [blocks[p // TOKENS] * TOKENS + p % TOKENS for p in range(first, first + count)]
        starts.append(starts[-1] + count)
    lengths = [first + count for first, count, _ in parts]
    spans = Spans(
        starts_P1=torch.tensor(starts, dtype=torch.int32),
        lengths_P=torch.tensor(lengths, dtype=torch.int32),
        table_PM=table,
        decodes=decodes,
        longest_part=max(count for _, count, _ in parts),
        longest=max(lengths),
        parts=tuple((first, count) for first, count, _ in parts[decodes:]),
    )
    return spans, torch.tensor(places)


def made(tokens: int, seed: int) -> Tensor:
    width = (HEADS + 2 * KV_HEADS) * WIDTH
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    table = positions[:, None] * torch.linspace(1.0, 0.01, WIDTH // 2)
    return table.cos(), table.sin()


def in_steps(cuts: list[int], blocks: list[int], cache: KvCache, qkv: Tensor, cap: float | None) -> Tensor:
    """A sequence through the cache, in pieces."""
    out, first = [], 0
    for count in cuts:
        spans, places = step_of([(first, count, blocks)])
        rows = qkv[first : first + count].clone()
        cos, sin = angles(torch.arange(first, first + count))
        q, _, _ = rotate_and_cache_reference(rows, cos, sin, cache, places)
        out.append(paged_attention_reference(q, cache, spans, SCALE, cap))
        first += count
    return torch.cat(out)


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [17, 1, 1, 21], [16, 16, 8]])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_any_cut_into_steps_is_plain_attention(cuts, cap):
    qkv = made(40, seed=1)
    stepped = in_steps(cuts, [5, 0, 3], empty_cache(6), qkv, cap)
    _, places = step_of([(0, 40, [0, 1, 2])])
    q, k, v = rotate_and_cache_reference(qkv, *angles(torch.arange(40)), empty_cache(3), places)
    plain = causal_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), cap=cap)[0].transpose(0, 1)
    torch.testing.assert_close(stepped, plain, rtol=1e-4, atol=1e-5)


STEPS = {
    "generating": [(20, 1, [4, 1]), (0, 1, [2]), (15, 1, [0]), (47, 1, [5, 6, 7])],
    "prompts": [(0, 40, [3, 1, 6]), (0, 5, [2])],
    "a chunk after others": [(17, 12, [3, 1]), (32, 3, [4, 5, 6])],
    "all at once": [(20, 1, [4, 1]), (33, 1, [0, 9, 10]), (0, 7, [2]), (16, 20, [5, 6, 7])],
}


@pytest.mark.parametrize("parts", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("rotates", [True, False])
def test_triton_is_the_reference(parts, cap, rotates):
    spans, places = step_of(parts)
    qkv = made(len(places), seed=2)
    table = angles(torch.arange(len(places))) if rotates else (None, None)
    caches = empty_cache(12), empty_cache(12)
    generator = torch.Generator().manual_seed(3)
    old = [torch.randn(x.shape, generator=generator) for x in (caches[0].keys_BGLD, caches[0].values_BGDL)]
    for cache in caches:
        cache.keys_BGLD.copy_(old[0])
        cache.values_BGDL.copy_(old[1])
    q, k, v = rotate_and_cache_reference(qkv.clone(), *table, caches[0], places)
    expected = paged_attention_reference(q, caches[0], spans, SCALE, cap)
    views = rotate_and_cache_triton(qkv.clone(), *table, caches[1], places)
    for mine, its in zip((q, k, v), views, strict=True):
        torch.testing.assert_close(its, mine)
    torch.testing.assert_close(caches[1].keys_BGLD, caches[0].keys_BGLD)
    torch.testing.assert_close(caches[1].values_BGDL, caches[0].values_BGDL)
    torch.testing.assert_close(
        paged_attention_triton(*views, caches[1], spans, SCALE, cap), expected, rtol=1e-4, atol=1e-5
    )


def test_shares_of_a_long_sequence_come_together(monkeypatch):
    monkeypatch.setattr("llmb.ops.attention.paged_attention_triton.SHORTEST_SHARE", 8)
    spans, _ = step_of([(50, 1, [4, 1, 2, 0]), (3, 1, [3])])
    assert shares_of(2, KV_HEADS, spans.longest, FULL_GPU, 8, MOST_SHARES) == 4
    cache = empty_cache(6)
    cache.keys_BGLD.normal_(generator=torch.Generator().manual_seed(4))
    cache.values_BGDL.normal_(generator=torch.Generator().manual_seed(5))
    q = made(2, seed=6).unflatten(-1, (-1, WIDTH))[:, :HEADS]
    expected = paged_attention_reference(q, cache, spans, SCALE)
    torch.testing.assert_close(paged_attention_triton(q, q, q, cache, spans, SCALE, None), expected)


def test_padding_neither_reads_nor_writes():
    """A padded decode: place -1, length 0, a table that names no block."""
    spans, _ = step_of([(20, 1, [4, 1]), (0, 1, [0])])
    spans.lengths_P[1] = 0
    spans.table_PM[1] = 10**6
    cache = empty_cache(6)
    before = cache.keys_BGLD.clone(), cache.values_BGDL.clone()
    q, k, v = rotate_and_cache_triton(made(2, 7), None, None, cache, torch.tensor([-1, -1]))
    paged_attention_triton(q, k, v, cache, spans, SCALE, None)
    torch.testing.assert_close((cache.keys_BGLD, cache.values_BGDL), before)


def test_a_cache_in_8_bits_holds_numbers_times_its_scale():
    spans, places = step_of([(0, 20, [1, 0])])
    cache = empty_cache(2, torch.float8_e4m3fn, scale=0.5)
    qkv = made(20, seed=8)
    q, k, v = rotate_and_cache_reference(qkv, None, None, cache, places)
    rounded = [(x * 2).to(torch.float8_e4m3fn).float() / 2 for x in (k, v)]
    plain = causal_attention(*(x.transpose(0, 1)[None] for x in (q, *rounded)))[0].transpose(0, 1)
    torch.testing.assert_close(paged_attention_reference(q, cache, spans, SCALE), plain, rtol=1e-4, atol=1e-5)
