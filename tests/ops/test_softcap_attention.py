"""Attention with logit softcap: chunks against the unchunked, kernels against chunks, a huge softcap."""

import pytest
import torch
import torch.nn.functional as F

from llmb.ops.softcap import softcap_attention_triton as kernels
from llmb.ops.softcap.softcap_attention import kernel_supports, softcap_attention
from llmb.ops.softcap.softcap_tiles import KernelTiles, Tiles

SCALE = 0.4
attend = softcap_attention.triton
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are exact in the interpreter only")


def qkv(tokens: int = 37, heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    return tuple(
        (3 * torch.randn(2, count, tokens, head_dim, generator=generator)).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )


def with_gradients(result: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    dy = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    return [result, *torch.autograd.grad(result, inputs, dy)]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_formula(kv_heads: int) -> None:
    inputs = qkv(kv_heads=kv_heads)
    q, k, v = inputs[0], *(x.repeat_interleave(4 // kv_heads, dim=1) for x in inputs[1:])
    logits = 5.0 * torch.tanh(SCALE * torch.einsum("bhqd,bhkd->bhqk", q, k) / 5.0)
    later = torch.triu(torch.ones(37, 37, dtype=torch.bool), diagonal=1)
    unchunked = torch.softmax(logits.masked_fill(later, -1e30), dim=-1) @ v
    assert_equal(with_gradients(softcap_attention(*inputs, SCALE, 5.0), inputs), with_gradients(unchunked, inputs))


@pytest.mark.parametrize(
    ("queries", "tokens", "chunk"),
    [*((37, 37, chunk) for chunk in (1, 8, 36, 37, 100)), *((queries, 64, 8) for queries in (1, 10, 64))],
)
def test_chunks_of_the_last_queries_attend_as_among_all(queries: int, tokens: int, chunk: int) -> None:
    inputs = qkv(tokens)
    last = (inputs[0][:, :, -queries:], *inputs[1:])
    among_all = softcap_attention.reference(*inputs, SCALE, 5.0)[:, :, -queries:]
    chunks = softcap_attention.reference(*last, SCALE, 5.0, chunk=chunk)
    assert_equal(with_gradients(chunks, inputs), with_gradients(among_all, inputs))


def test_a_huge_softcap_is_plain_attention_and_a_small_one_is_not() -> None:
    inputs = qkv()
    plain = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(softcap_attention(*inputs, SCALE, 1e5), plain, rtol=1e-3, atol=1e-3)
    assert (softcap_attention(*inputs, SCALE, 5.0) - plain).abs().max() > 0.1


def test_bf16_keeps_its_dtype() -> None:
    inputs = tuple(x.detach().bfloat16() for x in qkv())
    rounded = softcap_attention(*inputs, SCALE, 5.0)
    assert rounded.dtype == torch.bfloat16
    exact = softcap_attention(*(x.float() for x in inputs), SCALE, 5.0)
    assert (rounded.float() - exact).norm() / exact.norm() < 0.01


def test_supported_arguments_of_the_kernels() -> None:
    q, _, v = (x.detach().bfloat16() for x in qkv())
    assert kernel_supports(q, v, v, SCALE, 60.0)
    assert kernel_supports(q, v, v, SCALE, 60.0, 7)
    assert not kernel_supports(q.float(), v.float(), v.float(), SCALE, 30.0)
    assert not kernel_supports(q, v, v, SCALE, 61.0)
    assert not kernel_supports(q[..., :12], v[..., :12], v[..., :12], SCALE, 30.0)
    assert not kernel_supports(q, v, v[..., :8], SCALE, 30.0)


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """Make a few tokens several tiles, more than one of them without a mask."""
    tiles = KernelTiles(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1))
    monkeypatch.setattr(kernels, "tiles_for", lambda *_: tiles)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("queries", "tokens", "kv_heads"),
    [
        *((1, 1, 1), (31, 31, 4), (17, 70, 2)),
        *(
            pytest.param(*p, marks=pytest.mark.nightly)
            for p in ((100, 100, 1), (1, 64, 2), (40, 41, 2), (96, 96, 1), (96, 96, 4), (100, 100, 4), (32, 96, 2))
        ),
    ],
)
def test_kernels_equal_the_reference(small_tiles, queries: int, tokens: int, kv_heads: int) -> None:
    inputs = qkv(tokens, kv_heads=kv_heads)
    last = (inputs[0][:, :, -queries:], *inputs[1:])
    plain = softcap_attention.reference(*last, SCALE, 5.0)
    assert_equal(with_gradients(attend(*last, SCALE, 5.0), inputs), with_gradients(plain, inputs))


@pytest.mark.slow
@interpreted
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered")  # queries beyond the last see no key
@pytest.mark.parametrize(
    ("queries", "tokens", "window"),
    [
        *((50, 50, 5), (70, 70, 60), (40, 97, 20), (9, 20, 50)),
        *(
            pytest.param(*p, marks=pytest.mark.nightly)
            for p in ((96, 96, 32), (100, 100, 1), (1, 80, 9), (64, 128, 16))
        ),
    ],
)
def test_kernels_with_a_window_equal_the_reference(small_tiles, queries: int, tokens: int, window: int) -> None:
    """Windows shorter than a tile, longer than all keys, and with tiles in between that need no mask."""
    inputs = qkv(tokens, heads=2, kv_heads=1)
    last = (inputs[0][:, :, -queries:], *inputs[1:])
    plain = softcap_attention.reference(*last, SCALE, 5.0, window)
    assert_equal(with_gradients(attend(*last, SCALE, 5.0, window), inputs), with_gradients(plain, inputs))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("queries", "tokens"), [(20, 70), (64, 32)])
def test_kernels_of_keys_that_all_queries_see(small_tiles, queries: int, tokens: int) -> None:
    q, k, v = (x.detach() for x in qkv(max(queries, tokens), kv_heads=4))
    inputs = tuple(x.contiguous().requires_grad_() for x in (q[:, :, :queries], k[:, :, :tokens], v[:, :, :tokens]))
    scores = 5.0 * torch.tanh(SCALE * inputs[0] @ inputs[1].mT / 5.0)
    y, dq, dk, dv = with_gradients(scores.softmax(-1) @ inputs[2], inputs)
    q, k, v = (x.detach() for x in inputs)
    logits = kernels.Logits(SCALE, 5.0, causal=False)
    out, lse = kernels.softcap_forward(q, k, v, logits)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    actual_dq, delta = kernels.softcap_backward_dq(dy, out, lse, q, k, v, logits)
    actual_dkv = kernels.softcap_backward_dkv(dy, lse, delta, q, k, v, logits)
    assert_equal([out, actual_dq, *actual_dkv], [y, dq, dk, dv])


@pytest.mark.nightly
@interpreted
def test_kernels_with_heads_of_256() -> None:
    """With the tiles of a GPU, several of keys."""
    inputs = qkv(150, heads=2, kv_heads=1, head_dim=256)
    plain = softcap_attention.reference(*inputs, 0.01, 5.0, 70)
    assert_equal(with_gradients(attend(*inputs, 0.01, 5.0, 70), inputs), with_gradients(plain, inputs))


@pytest.mark.slow
@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of masked logits, and of tanh near 1
@pytest.mark.parametrize("size", [0.0, 1e-3, 1e3])
def test_kernels_with_zeros_and_with_logits_at_the_maximum_softcap(small_tiles, size: float) -> None:
    inputs = tuple((size * x.detach()).requires_grad_() for x in qkv(48))
    exact = softcap_attention.reference(*inputs, SCALE, 60.0)
    actual = with_gradients(attend(*inputs, SCALE, 60.0), inputs)
    for x, reference in zip(actual, with_gradients(exact, inputs), strict=True):
        assert x.isfinite().all()
        atol = 1e-4 * max(1.0, reference.detach().abs().max().item())
        torch.testing.assert_close(x, reference, rtol=1e-3, atol=atol)


@pytest.mark.slow
@interpreted
def test_kernels_take_strided_tensors(small_tiles) -> None:
    """Tokens before heads, as projections give them; and rows that are not contiguous."""
    inputs = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(40))
    strided = tuple(x.detach().mT.contiguous().mT.requires_grad_() for x in inputs)
    plain = with_gradients(softcap_attention.reference(*inputs, SCALE, 5.0), inputs)
    for some in (inputs, strided):
        actual = attend(*some, SCALE, 5.0)
        assert actual.transpose(1, 2).is_contiguous()
        assert_equal(with_gradients(actual, some), plain)
