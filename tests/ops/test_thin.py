"""Kernels for a handful of tokens are what they stand for: norm, product, gate, sum; rotation, cache, attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.attention.decode_attention import thin_attention_reference
from llmb.ops.attention.decode_attention_triton import (
    FULL_GPU,
    MOST_SHARES,
    SHORTEST_SHARE,
    _arrivals,
    thin_attention_triton,
)
from llmb.ops.attention.online_softmax_triton import shares_of
from llmb.ops.attention.paged_attention import KvCache
from llmb.ops.gemm import skinny_gemm_triton
from llmb.ops.gemm.skinny_gemm import MOST_TOKENS, Norm, ThinWeight, thin_product_reference
from llmb.ops.gemm.skinny_gemm_triton import step_of, thin_product_triton, tile_of
from llmb.ops.quant.activation_quant import Rows8

E4M3 = torch.float8_e4m3fn
TOKENS = st.integers(1, MOST_TOKENS)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    tokens=TOKENS,
    inputs=st.sampled_from([8, 16, 128, 1100, 2304]),
    outputs=st.sampled_from([2, 6, 14, 32]),
    seed=st.integers(0, 99),
    eight_bits=st.booleans(),
    normed=st.booleans(),
    activation=st.sampled_from([None, "silu", "gelu"]),
    adds=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_one_kernel_is_norm_product_gate_and_sum(
    tokens: int,
    inputs: int,
    outputs: int,
    seed: int,
    eight_bits: bool,
    normed: bool,
    activation: str | None,
    adds: bool,
) -> None:
    x, values = 3 * drawn(tokens, inputs, seed=seed), drawn(outputs, inputs, seed=seed + 1) * inputs**-0.5
    weight = ThinWeight(values.to(E4M3), drawn(outputs, seed=seed + 2).abs()) if eight_bits else ThinWeight(values)
    norm = Norm(drawn(inputs, seed=seed + 3), 1e-5) if normed else None
    onto = drawn(tokens, outputs // 2 if activation else outputs, seed=seed + 4) if adds else None
    kept = None if onto is None else onto.clone()
    expected = thin_product_reference(x, weight, torch.float32, norm, activation, onto)
    made = thin_product_triton(x, weight, torch.float32, norm, activation, onto)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    assert onto is None or torch.equal(onto, kept), "the stream is left as it was"


def test_inputs_in_8_bits_have_their_scales() -> None:
    x, values = drawn(3, 1100, seed=1), drawn(10, 1100, seed=2)
    given_x = Rows8(x, drawn(3, 1, seed=3).abs())
    for weight in (ThinWeight(values), ThinWeight(values, drawn(10, seed=4).abs())):
        expected = thin_product_reference(given_x, weight, torch.float32)
        torch.testing.assert_close(thin_product_triton(given_x, weight, torch.float32), expected, rtol=1e-4, atol=1e-4)


def test_what_comes_out_is_in_the_format_asked_for() -> None:
    x, weight = drawn(2, 64, seed=1).bfloat16(), ThinWeight(drawn(32, 64, seed=2).bfloat16())
    made = thin_product_triton(x, weight, torch.bfloat16, Norm(torch.ones(64).bfloat16(), 1e-5), "silu")
    assert made.dtype is torch.bfloat16
    assert made.shape == (2, 16)


def test_programs_take_rows_in_turn_and_long_rows_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_gemm_triton, "PROCESSORS", 1)
    monkeypatch.setattr(skinny_gemm_triton, "MOST_INPUTS", 2)
    for inputs, activation in ((256, None), (256, "silu"), (1300, None), (1300, "gelu")):
        x, weight = drawn(2, inputs, seed=1), ThinWeight(drawn(60, inputs, seed=2) * inputs**-0.5)
        norm = Norm(drawn(inputs, seed=3), 1e-5)
        expected = thin_product_reference(x, weight, torch.float32, norm, activation)
        made = thin_product_triton(x, weight, torch.float32, norm, activation)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


def test_a_program_takes_as_many_inputs_as_its_registers_hold() -> None:
    down = tile_of(torch.empty(4096, 14336, dtype=torch.bfloat16, device="meta"))
    assert [step_of(down, tokens, 14336, packed=False) for tokens in (1, 2, 4)] == [16384, 8192, 4096]
    assert step_of(down, 2, 14336, packed=True) == 16384
    assert step_of(down, 1, 100, packed=False) == 256


HEADS, KV_HEADS, WIDTH, LENGTH = 6, 2, 16, 16  # the last: tokens of a block
LONGEST = 150


def caches(dtype: torch.dtype, scales: tuple[float, float], seed: int) -> tuple[KvCache, KvCache]:
    """Two alike, full of older tokens."""
    shapes = ((48, KV_HEADS, LENGTH, WIDTH), (48, KV_HEADS, WIDTH, LENGTH))
    old = [drawn(*shape, seed=seed + place).to(dtype) for place, shape in enumerate(shapes)]
    first, second = (KvCache(*(x.clone() for x in old), *scales) for _ in range(2))
    return first, second


def decodes(lengths: list[int]) -> tuple[Spans, Tensor]:
    """One token each; the i-th sequence has blocks 10 i and on. A length of 0 is padding, whose blocks are nowhere."""
    n, most = len(lengths), -(-LONGEST // LENGTH)
    table = torch.arange(most, dtype=torch.int32) + 10 * torch.arange(n, dtype=torch.int32)[:, None]
    places = [int(table[i, (m - 1) // LENGTH]) * LENGTH + (m - 1) % LENGTH if m else -1 for i, m in enumerate(lengths)]
    table[[m == 0 for m in lengths]] = 10**6
    spans = Spans(
        starts_P1=torch.arange(n + 1, dtype=torch.int32),
        lengths_P=torch.tensor(lengths, dtype=torch.int32),
        table_PM=table,
        decodes=n,
        longest_part=1,
        longest=LONGEST,
    )
    return spans, torch.tensor(places)


@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 64, 97, 149, 150]), min_size=1, max_size=MOST_TOKENS),
    rotates=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    shares=st.sampled_from([1, 4, 16]),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 2.0)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_one_kernel_is_rotation_cache_and_attention(
    lengths: list[int],
    rotates: bool,
    cap: float | None,
    shares: int,
    scales: tuple[float, float],
    seed: int,
) -> None:
    spans, places = decodes(lengths)
    qkv = drawn(len(lengths), (HEADS + 2 * KV_HEADS) * WIDTH, seed=seed)
    angles = drawn(len(lengths), WIDTH // 2, seed=seed + 1)
    table = (angles.cos(), angles.sin()) if rotates else (None, None)
    theirs, ours = caches(torch.float32, scales, seed + 2)
    given_qkv = qkv.clone()
    expected = thin_attention_reference(qkv.clone(), *table, theirs, places, spans, 0.25, cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmb.ops.attention.decode_attention_triton.shares_of", lambda *_: shares)
        made = thin_attention_triton(qkv, *table, ours, places, spans, 0.25, cap)
    there = spans.lengths_P > 0
    torch.testing.assert_close(made[there], expected[there], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((ours.keys_BGLD, ours.values_BGDL), (theirs.keys_BGLD, theirs.values_BGDL))
    assert torch.equal(qkv, given_qkv)
    assert not _arrivals(qkv.device, len(lengths) * KV_HEADS).any(), "ready for the next kernel"


def test_an_8_bit_cache_gives_older_tokens_rounded_and_the_newest_as_it_is() -> None:
    spans, places = decodes([40, 1])
    qkv = drawn(2, (HEADS + 2 * KV_HEADS) * WIDTH, seed=1)
    theirs, ours = caches(E4M3, (0.5, 0.25), seed=2)
    exact, _ = caches(torch.float32, (1.0, 1.0), seed=2)
    exact.keys_BGLD.copy_(theirs.keys_BGLD.float() * 0.5)
    exact.values_BGDL.copy_(theirs.values_BGDL.float() * 0.25)
    expected = thin_attention_reference(qkv.clone(), None, None, exact, places, spans, 0.25, None)
    made = thin_attention_triton(qkv.clone(), None, None, ours, places, spans, 0.25, None)
    torch.testing.assert_close(made, expected, rtol=2e-3, atol=2e-3)  # products are in fp16
    thin_attention_reference(qkv, None, None, theirs, places, spans, 0.25, None)
    for mine, its in ((ours.keys_BGLD, theirs.keys_BGLD), (ours.values_BGDL, theirs.values_BGDL)):
        differ = mine.float() != its.float()
        assert differ.float().mean() < 0.01  # the interpreter rounds roughly where a number carries


@pytest.mark.parametrize(
    ("parts", "kv_heads", "longest", "shares"),
    [(1, 8, 2048, 32), (4, 8, 2048, 32), (1, 8, 40, 1), (1, 1, 100_000, 64), (4, 128, 2048, 2)],
)
def test_shares_fill_the_gpu_but_leave_each_its_tokens(parts: int, kv_heads: int, longest: int, shares: int) -> None:
    assert shares_of(parts, kv_heads, longest, FULL_GPU, SHORTEST_SHARE, MOST_SHARES) == shares
