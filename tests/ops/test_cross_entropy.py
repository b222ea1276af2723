"""Cross-entropy with its gradient over the logits: the reference against autograd; its kernels: op_cases/loss.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.loss.cross_entropy import cross_entropy_grad_, vocab_parallel_grad_, vocab_parallel_logsumexp


def inputs(n: int, v: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits, and labels of which every third is ignored."""
    generator = torch.Generator().manual_seed(n + v)
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[2::3] = -100
    return torch.randn(n, v, generator=generator) * scale, labels


def exact(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Losses and gradient."""
    grad, losses = logits.double(), torch.empty(len(labels), dtype=torch.float64)
    cross_entropy_grad_.reference(grad, labels, scale, losses)
    return losses, grad


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_reference_matches_autograd(softcap: float | None) -> None:
    logits, labels = inputs(8, 11, 3.0)
    leaf = logits.double().requires_grad_()
    final_logits = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
    expected = F.cross_entropy(final_logits, labels, reduction="none", ignore_index=-100)
    (expected_grad,) = torch.autograd.grad(expected.sum() * 0.25, leaf)
    grad, losses = logits.double(), torch.empty(8, dtype=torch.float64)
    cross_entropy_grad_(grad, labels, 0.25, losses, softcap)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(grad, expected_grad)


def vocab_parallel(logits: Tensor, labels: Tensor, starts: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """Losses and gradient over ranges of the vocabulary that begin at `starts`, as their ranks compute them."""
    grad, dtype = logits.clone(), torch.promote_types(logits.dtype, torch.float32)
    parts = [grad[:, first:end] for first, end in zip(starts, (*starts[1:], logits.shape[1]), strict=True)]
    lse, label_logits = (torch.full((len(starts), len(labels)), torch.nan, dtype=dtype).to(grad.device) for _ in "12")
    for rank, (first, part) in enumerate(zip(starts, parts, strict=True)):
        vocab_parallel_logsumexp(part, labels, first, lse[rank], label_logits[rank])
    total = lse.logsumexp(0)
    for first, part in zip(starts, parts, strict=True):
        vocab_parallel_grad_(part, labels, first, total, scale)
    return total - label_logits.sum(0), grad


@pytest.mark.parametrize("starts", [[0], [0, 1, 6], [0, 10]])
def test_vocab_parallel_reference_matches_the_whole_vocabulary(starts: list[int]) -> None:
    logits, labels = inputs(8, 11, 3.0)
    logits, labels = logits.double(), labels.abs() % 11
    for actual, expected in zip(vocab_parallel(logits, labels, starts, 0.25), exact(logits, labels, 0.25), strict=True):
        torch.testing.assert_close(actual, expected)
