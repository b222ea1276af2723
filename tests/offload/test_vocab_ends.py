"""Embedding and head in vocabulary shards and loss chunks, against autograd over all tokens at once."""

import pytest
import torch
from torch import Tensor

from llmb.offload.vocab_ends import embed, embed_backward, head_loss

TOKENS, HIDDEN, VOCAB, EPS, SCALE = 13, 16, 29, 1e-5, 0.1


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_labels() -> Tensor:
    labels = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(4))
    labels[2] = labels[9] = -100
    return labels


def head_by_autograd(inp: Tensor, norm: Tensor, head: Tensor) -> tuple[Tensor, ...]:
    inp, norm, head = (x.clone().requires_grad_() for x in (inp, norm, head))
    logits = torch.nn.functional.rms_norm(inp, (HIDDEN,), norm, EPS) @ head.T
    losses = torch.nn.functional.cross_entropy(logits, random_labels(), ignore_index=-100, reduction="none")
    return (losses.detach(), *torch.autograd.grad(losses.sum() * SCALE, (inp, norm, head)))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("loss_tokens", [1, 5, TOKENS, 100])
@pytest.mark.parametrize("shards", [1, 3])
def test_head_matches_autograd(shards, loss_tokens, accumulate):
    inp, norm, head = randn(TOKENS, HIDDEN), 1 + randn(HIDDEN, seed=1) / 5, randn(VOCAB, HIDDEN, seed=2)
    before = 2.0 if accumulate else torch.nan
    losses, d_residual = torch.full((TOKENS,), torch.nan), torch.full_like(inp, torch.nan)
    dhead, dnorm = torch.full_like(head, before), torch.full_like(norm, before)
    scale = torch.tensor(SCALE) if accumulate else SCALE
    head_loss(
        inp, norm, EPS, head.chunk(shards), random_labels(), scale, d_residual, dhead.chunk(shards), dnorm, accumulate,
        losses, loss_tokens,
    )  # fmt: skip
    if accumulate:
        dhead, dnorm = dhead - before, dnorm - before
    names, actual = ("losses", "inp", "norm", "head"), (losses, d_residual, dnorm, dhead)
    for name, result, expected in zip(names, actual, head_by_autograd(inp, norm, head), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name} {text}")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_embedding_matches_autograd(shards, accumulate):
    tokens = random_labels().clamp(min=0)
    weight = randn(VOCAB, HIDDEN).requires_grad_()
    expected, d_residual = torch.nn.functional.embedding(tokens, weight), randn(TOKENS, HIDDEN, seed=1)
    expected.backward(d_residual)
    out = torch.full_like(expected, torch.nan)
    embed(tokens, weight.detach().chunk(shards), out)
    torch.testing.assert_close(out, expected.detach())
    dweight = torch.full_like(weight, 2.0 if accumulate else torch.nan).detach()
    embed_backward(d_residual, tokens, dweight.chunk(shards), accumulate)
    torch.testing.assert_close(dweight - (2.0 if accumulate else 0.0), weight.grad, rtol=1e-5, atol=1e-5)
