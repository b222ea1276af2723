"""Heads of latent attention: the plain form against the rotation in use, the kernels against the plain form."""

import pytest
import torch
from torch import Tensor

from llmb.ops.rope import mla_rope
from llmb.ops.rope.mla_rope import latent_keys, latent_queries
from llmb.ops.rope.rope import rotate_interleaved

pytest.importorskip("triton")

# B sequences, T tokens, H heads, still channels, turned channels, of a value
SHAPES = [(2, 5, 3, 8, 4, 6), (1, 1, 1, 16, 2, 16), (1, 3, 40, 12, 10, 5), (2, 7, 16, 128, 64, 128)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries, keys beside values, the shared key, cosine, sine; the shared key lies in wider rows."""
    batch, tokens, heads, still, turned, value = shape
    generator = torch.Generator().manual_seed(sum(shape))
    angle = torch.rand(tokens, turned // 2, generator=generator) * 100
    drawn = [
        torch.randn(batch, tokens, *sizes, generator=generator).to(dtype)
        for sizes in ((heads, still + turned), (heads, still + value), (3 + turned,))
    ]
    return drawn[0], drawn[1], drawn[2][..., 3:], angle.cos(), angle.sin()


def with_gradients(shape: tuple[int, ...], given: tuple[Tensor, ...]) -> list[Tensor]:
    """Queries, keys, values; slopes of all three that were given."""
    q, kv, key, cos, sin = given
    q, kv, key = (one.detach().requires_grad_() for one in (q, kv, key))
    made = (latent_queries(q, cos, sin), *latent_keys(kv, key, cos, sin, shape[3]))
    slopes = [
        torch.randn(one.transpose(1, 2).shape, generator=torch.Generator().manual_seed(n)).to(one).transpose(1, 2)
        for n, one in enumerate(made)
    ]  # as attention leaves them: heads before tokens
    return [*(one.detach() for one in made), *torch.autograd.grad(made, (q, kv, key), slopes)]


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_queries_and_keys_are_those_of_the_rotation_in_use(shape: tuple[int, ...]) -> None:
    q, kv, key, cos, sin = inputs(shape)
    still = shape[3]
    ours_q, (ours_k, v) = latent_queries(q, cos, sin), latent_keys(kv, key, cos, sin, still)
    turned_q = rotate_interleaved(q[..., still:], cos, sin)
    turned_k = rotate_interleaved(key[:, :, None], cos, sin).expand_as(turned_q)
    their_q, their_k = torch.cat((q[..., :still], turned_q), -1), torch.cat((kv[..., :still], turned_k), -1)
    ours, theirs = (torch.einsum("bthd,bshd->bhts", *pair) for pair in ((ours_q, ours_k), (their_q, their_k)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(v, kv[..., still:])


@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_give_what_plain_torch_gives(
    shape: tuple[int, ...], size: float, device: torch.device, monkeypatch
) -> None:
    *drawn, cos, sin = inputs(shape)
    given = (*(size * one for one in drawn), cos, sin)
    exact = with_gradients(shape, tuple(one.double() for one in given))
    monkeypatch.setattr(mla_rope, "takes_triton", lambda _: True)
    ours = with_gradients(shape, tuple(one.to(device) for one in given))
    for one, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.cpu().double(), wanted, rtol=1e-5, atol=1e-5 * max(size, 1.0))


def test_kernels_in_bf16_round_once(device: torch.device, monkeypatch) -> None:
    shape = SHAPES[-1]
    given = inputs(shape, torch.bfloat16)
    exact = with_gradients(shape, tuple(one.double() for one in given))
    monkeypatch.setattr(mla_rope, "takes_triton", lambda _: True)
    for one, wanted in zip(with_gradients(shape, tuple(one.to(device) for one in given)), exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.cpu().double() - wanted).norm() / wanted.norm() < 2**-7  # the interpreter cuts off


def test_values_are_a_view_and_nothing_is_copied(device: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(mla_rope, "takes_triton", lambda _: True)
    _, kv, key, cos, sin = (one.to(device) for one in inputs(SHAPES[0]))
    _, v = latent_keys(kv, key, cos, sin, 8)
    assert v.untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()
