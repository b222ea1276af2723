"""Embedding and head in parts and in a few tokens at a time, against autograd over all at once."""

import pytest
import torch
from torch import Tensor

from llmb.offload.vocab_ends import embed, embed_backward, head_loss

TOKENS, HIDDEN, VOCABULARY, EPS, SCALE = 13, 16, 29, 1e-5, 0.1


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels() -> Tensor:
    found = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(4))
    found[2] = found[9] = -100
    return found


def by_autograd(inp: Tensor, norm: Tensor, head: Tensor) -> tuple[Tensor, ...]:
    inp, norm, head = (x.clone().requires_grad_() for x in (inp, norm, head))
    logits = torch.nn.functional.rms_norm(inp, (HIDDEN,), norm, EPS) @ head.T
    losses = torch.nn.functional.cross_entropy(logits, labels(), ignore_index=-100, reduction="none")
    return (losses.detach(), *torch.autograd.grad(losses.sum() * SCALE, (inp, norm, head)))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("loss_tokens", [1, 5, TOKENS, 100])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_head_equals_autograd(parts, loss_tokens, fresh):
    inp, norm, head = drawn(TOKENS, HIDDEN), 1 + drawn(HIDDEN, seed=1) / 5, drawn(VOCABULARY, HIDDEN, seed=2)
    before = torch.nan if fresh else 2.0
    losses, dstream = torch.full((TOKENS,), torch.nan), torch.full_like(inp, torch.nan)
    dhead, dnorm = torch.full_like(head, before), torch.full_like(norm, before)
    head_loss(
        inp,
        norm,
        EPS,
        head.chunk(parts),
        labels(),
        SCALE,
        dstream,
        dhead.chunk(parts),
        dnorm,
        fresh,
        losses,
        loss_tokens,
    )
    wanted = by_autograd(inp, norm, head)
    if not fresh:
        dhead, dnorm = dhead - before, dnorm - before
    for name, one, exact in zip(
        ("losses", "inp", "norm", "head"), (losses, dstream, dnorm, dhead), wanted, strict=True
    ):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name} {text}")


def test_a_scale_on_the_device_is_the_same_scale():
    inp, norm, head = drawn(TOKENS, HIDDEN), torch.ones(HIDDEN), drawn(VOCABULARY, HIDDEN, seed=2)
    streams = []
    for scale in (SCALE, torch.tensor(SCALE)):
        stream, losses = torch.empty_like(inp), torch.empty(TOKENS)
        head_loss(
            inp, norm, EPS, [head], labels(), scale, stream, [torch.empty_like(head)], torch.empty_like(norm), True,
            losses, 4,
        )  # fmt: skip
        streams.append(stream)
    torch.testing.assert_close(*streams)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_embedding_equals_autograd(parts, fresh):
    tokens = labels().clamp(min=0)
    weight = drawn(VOCABULARY, HIDDEN).requires_grad_()
    wanted, dstream = torch.nn.functional.embedding(tokens, weight), drawn(TOKENS, HIDDEN, seed=1)
    wanted.backward(dstream)
    out = torch.full_like(wanted, torch.nan)
    embed(tokens, weight.detach().chunk(parts), out)
    torch.testing.assert_close(out, wanted.detach())
    dweight = torch.full_like(weight, torch.nan if fresh else 2.0).detach()
    embed_backward(dstream, tokens, dweight.chunk(parts), fresh)
    torch.testing.assert_close(dweight - (0.0 if fresh else 2.0), weight.grad, rtol=1e-5, atol=1e-5)
