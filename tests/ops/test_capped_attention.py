"""Attention with capped logits: chunks against the whole, kernels against chunks, a huge cap."""

import pytest
import torch
import torch.nn.functional as F

from llmb.ops.attention import softcap_attention_triton as kernels
from llmb.ops.attention.softcap_attention import capped_attention, capped_attention_reference, kernels_take

SCALE = 0.4
attend = kernels.CappedAttention.apply
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are exact in the interpreter only")


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


@pytest.mark.parametrize("queries", [1, 10, 64])
def test_the_last_queries_alone_attend_as_among_all(queries: int) -> None:
    given = qkv(tokens=64)
    last = (given[0][:, :, -queries:], *given[1:])
    among_all = capped_attention_reference(*given, SCALE, 5.0)[:, :, -queries:]
    parts = capped_attention_reference(*last, SCALE, 5.0, chunk=8)
    assert_equal(with_gradients(parts, given), with_gradients(among_all, given))


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


def test_what_the_kernels_take() -> None:
    q, _, v = (x.detach().bfloat16() for x in qkv())
    assert kernels_take(q, v, 60.0)
    assert not kernels_take(q.float(), v.float(), 30.0)
    assert not kernels_take(q, v, 61.0)
    assert not kernels_take(q[..., :12], v[..., :12], 30.0)
    assert not kernels_take(q, v[..., :8], 30.0)


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """So that a few tokens are several tiles, more than one of them without a mask."""
    for name, queries, keys in (("THERE", 32, 16), ("BACK_TO_QUERIES", 16, 32), ("BACK_TO_KEYS", 16, 32)):
        monkeypatch.setattr(kernels, name, kernels.Tiles(queries, keys, 4, 1))


@interpreted
@pytest.mark.parametrize("tokens", [1, 31, 96, 100])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_kernels_compute_the_same(small_tiles, tokens: int, kv_heads: int) -> None:
    given = qkv(tokens, kv_heads=kv_heads)
    plain = capped_attention_reference(*given, SCALE, 5.0)
    assert_equal(with_gradients(attend(*given, SCALE, 5.0), given), with_gradients(plain, given))


@interpreted
@pytest.mark.parametrize(("queries", "tokens"), [(1, 64), (17, 70), (32, 96), (40, 41)])
def test_kernels_with_the_last_queries_alone(small_tiles, queries: int, tokens: int) -> None:
    given = qkv(tokens)
    last = (given[0][:, :, -queries:], *given[1:])
    plain = capped_attention_reference(*last, SCALE, 5.0)
    assert_equal(with_gradients(attend(*last, SCALE, 5.0), given), with_gradients(plain, given))


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of what is masked, and of what is squeezed to 1
@pytest.mark.parametrize("size", [0.0, 1e-3, 1e3])
def test_kernels_with_zeros_and_with_logits_at_the_highest_cap(small_tiles, size: float) -> None:
    given = tuple((size * x.detach()).requires_grad_() for x in qkv(48))
    exact = capped_attention_reference(*given, SCALE, 60.0)
    ours = with_gradients(attend(*given, SCALE, 60.0), given)
    for one, other in zip(ours, with_gradients(exact, given), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * max(1.0, other.detach().abs().max().item()))


@interpreted
def test_kernels_take_tensors_as_they_lie(small_tiles) -> None:
    """Tokens before heads, as projections give them; and numbers of a row that do not lie side by side."""
    given = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(40))
    apart = tuple(x.detach().mT.contiguous().mT.requires_grad_() for x in given)
    plain = with_gradients(capped_attention_reference(*given, SCALE, 5.0), given)
    for some in (given, apart):
        ours = attend(*some, SCALE, 5.0)
        assert ours.transpose(1, 2).is_contiguous()
        assert_equal(with_gradients(ours, some), plain)


@interpreted
def test_kernels_in_bf16_with_their_own_tiles() -> None:
    given = tuple(x.detach().bfloat16().requires_grad_() for x in qkv(150))
    exact = tuple(x.detach().float().requires_grad_() for x in given)
    plain = capped_attention_reference(*exact, SCALE, 30.0)
    ours = attend(*given, SCALE, 30.0)
    slope = torch.randn(plain.shape, generator=torch.Generator().manual_seed(5))
    found = [ours, *torch.autograd.grad(ours, given, slope.bfloat16())]
    for one, other in zip(found, [plain, *torch.autograd.grad(plain, exact, slope)], strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).norm() / other.norm() < 0.02
