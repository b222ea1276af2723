"""Our kernels of attention with capped logits against the plain form: gradients, odd sizes, large and no magnitudes."""

from importlib import import_module

import pytest
import torch

from llmb.kernels.capped_attention import capped_attention_reference

pytest.importorskip("triton")
kernels = import_module("llmb.kernels.capped_attention_triton")
attend = kernels.CappedAttention.apply
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in fp32, which only the interpreter adds exactly")
SCALE = 0.4


def qkv(tokens: int, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
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


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """So that a few tokens are several tiles, more than one of them without a mask."""
    for name, queries, keys in (("THERE", 32, 16), ("BACK_TO_QUERIES", 16, 32), ("BACK_TO_KEYS", 16, 32)):
        monkeypatch.setattr(kernels, name, kernels.Tiles(queries, keys, 4, 1))


@pytest.mark.parametrize("tokens", [1, 31, 96, 100])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_they_compute_the_same(small_tiles, tokens: int, kv_heads: int) -> None:
    given = qkv(tokens, kv_heads=kv_heads)
    plain = capped_attention_reference(*given, SCALE, 5.0)
    assert_equal(with_gradients(attend(*given, SCALE, 5.0), given), with_gradients(plain, given))


@pytest.mark.parametrize(("queries", "tokens"), [(1, 64), (17, 70), (32, 96), (40, 41)])
def test_with_the_last_queries_alone(small_tiles, queries: int, tokens: int) -> None:
    given = qkv(tokens)
    last = (given[0][:, :, -queries:], *given[1:])
    plain = capped_attention_reference(*last, SCALE, 5.0)
    assert_equal(with_gradients(attend(*last, SCALE, 5.0), given), with_gradients(plain, given))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of what is masked, and of what is squeezed to 1
@pytest.mark.parametrize("size", [0.0, 1e-3, 1e3])
def test_with_zeros_and_with_logits_at_the_highest_cap(small_tiles, size: float) -> None:
    given = tuple((size * x.detach()).requires_grad_() for x in qkv(48))
    exact = capped_attention_reference(*given, SCALE, 60.0)
    ours = with_gradients(attend(*given, SCALE, 60.0), given)
    for one, other in zip(ours, with_gradients(exact, given), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * max(1.0, other.detach().abs().max().item()))


def test_takes_tensors_as_they_lie(small_tiles) -> None:
    """Tokens before heads, as projections give them; and numbers of a row that do not lie side by side."""
    given = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(40))
    apart = tuple(x.detach().mT.contiguous().mT.requires_grad_() for x in given)
    plain = with_gradients(capped_attention_reference(*given, SCALE, 5.0), given)
    for some in (given, apart):
        ours = attend(*some, SCALE, 5.0)
        assert ours.transpose(1, 2).is_contiguous()
        assert_equal(with_gradients(ours, some), plain)


def test_in_bf16_with_its_own_tiles() -> None:
    given = tuple(x.detach().bfloat16().requires_grad_() for x in qkv(150))
    exact = tuple(x.detach().float().requires_grad_() for x in given)
    plain = capped_attention_reference(*exact, SCALE, 30.0)
    ours = attend(*given, SCALE, 30.0)
    slope = torch.randn(plain.shape, generator=torch.Generator().manual_seed(5))
    found = [ours, *torch.autograd.grad(ours, given, slope.bfloat16())]
    for one, other in zip(found, [plain, *torch.autograd.grad(plain, exact, slope)], strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).norm() / other.norm() < 0.02
