"""Cross-entropy with its gradient over the logits: the reference against autograd; its kernels: op_cases/loss.py."""

import pytest
import torch
import torch.nn.functional as F

from llmb.ops.loss.cross_entropy import cross_entropy_grad_


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_reference_matches_autograd(softcap: float | None) -> None:
    logits, labels = 3 * torch.randn(8, 11, dtype=torch.float64), torch.randint(0, 11, (8,))
    labels[2::3] = -100
    leaf = logits.clone().requires_grad_()
    final_logits = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
    expected = F.cross_entropy(final_logits, labels, reduction="none", ignore_index=-100)
    (expected_grad,) = torch.autograd.grad(expected.sum() * 0.25, leaf)
    losses = torch.empty(8, dtype=torch.float64)
    cross_entropy_grad_(logits, labels, 0.25, losses, softcap)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(logits, expected_grad)
