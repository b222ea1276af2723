"""Attention with capped logits: chunks against the whole, flex_attention's form of it, and what a huge cap gives."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from llmb.kernels.capped_attention import capped_attention, capped_attention_reference, flex_capped_attention

SCALE = 0.4


def qkv(tokens: int = 37, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    return tuple(
        (3 * torch.randn(2, count, tokens, 16, generator=generator)).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )


def with_gradients(result: torch.Tensor, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    slope = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    return [result, *torch.autograd.grad(result, given, slope)]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_formula(kv_heads: int) -> None:
    given = qkv(kv_heads=kv_heads)
    q, k, v = given[0], *(x.repeat_interleave(4 // kv_heads, dim=1) for x in given[1:])
    logits = 5.0 * torch.tanh(SCALE * torch.einsum("bhqd,bhkd->bhqk", q, k) / 5.0)
    later = torch.triu(torch.ones(37, 37, dtype=torch.bool), diagonal=1)
    whole = torch.softmax(logits.masked_fill(later, -1e30), dim=-1) @ v
    assert_equal(with_gradients(capped_attention(*given, SCALE, 5.0), given), with_gradients(whole, given))


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 100])
def test_chunks_change_nothing(chunk: int) -> None:
    given = qkv()
    whole = capped_attention_reference(*given, SCALE, 5.0)
    parts = capped_attention_reference(*given, SCALE, 5.0, chunk=chunk)
    assert_equal(with_gradients(parts, given), with_gradients(whole, given))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    given = tuple(x.detach() for x in qkv(tokens=64))  # not compiled, it has no backward pass on a CPU
    flexible = flex_capped_attention(flex_attention, *given, SCALE, 5.0)
    torch.testing.assert_close(flexible, capped_attention_reference(*given, SCALE, 5.0), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("queries", [1, 10, 64])
def test_the_last_queries_alone_attend_as_among_all(queries: int) -> None:
    given = qkv(tokens=64)
    last = (given[0][:, :, -queries:], *given[1:])
    among_all = capped_attention_reference(*given, SCALE, 5.0)[:, :, -queries:]
    parts = capped_attention_reference(*last, SCALE, 5.0, chunk=8)
    assert_equal(with_gradients(parts, given), with_gradients(among_all, given))
    flexible = flex_capped_attention(flex_attention, *(x.detach() for x in last), SCALE, 5.0)
    torch.testing.assert_close(flexible, among_all, rtol=1e-4, atol=1e-5)


def test_a_huge_cap_is_plain_attention_and_a_small_one_is_not() -> None:
    given = qkv()
    plain = F.scaled_dot_product_attention(*given, is_causal=True, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(capped_attention(*given, SCALE, 1e5), plain, rtol=1e-3, atol=1e-3)
    assert (capped_attention(*given, SCALE, 5.0) - plain).abs().max() > 0.1


def test_bf16_keeps_its_format() -> None:
    given = tuple(x.detach().bfloat16() for x in qkv())
    rounded = capped_attention(*given, SCALE, 5.0)
    assert rounded.dtype == torch.bfloat16
    exact = capped_attention(*(x.float() for x in given), SCALE, 5.0)
    assert (rounded.float() - exact).norm() / exact.norm() < 0.01
