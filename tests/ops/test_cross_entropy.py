"""Cross-entropy with its gradient over the logits: the reference against autograd, and edge cases of the kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.loss.cross_entropy import cross_entropy_grad_

pytest.importorskip("triton")
from llmb.ops.loss.cross_entropy_triton import TILE


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


def test_reference_matches_autograd() -> None:
    logits, labels = inputs(8, 11, 3.0)
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, labels, reduction="none", ignore_index=-100)
    (expected_grad,) = torch.autograd.grad(expected.sum() * 0.25, leaf)
    grad, losses = logits.double(), torch.empty(8, dtype=torch.float64)
    cross_entropy_grad_(grad, labels, 0.25, losses)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize(("n", "v"), [(4, 10), (3, 1003), (4, 2 * TILE + 5)])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_kernel_error_is_that_of_rounded_logits(n: int, v: int, scale: float, device: torch.device) -> None:
    logits, labels = inputs(n, v, scale)
    expected_losses, expected_grad = exact(logits, labels, 0.5)
    losses, grad = torch.full((n,), torch.nan, device=device), logits.to(device)
    cross_entropy_grad_.triton(grad, labels.to(device), 0.5, losses)
    tolerance = 1e-6 * (1 + scale)
    assert ((losses.cpu() - expected_losses).abs() <= tolerance * 10).all()
    assert ((grad.cpu() - expected_grad).abs() <= tolerance).all()


def test_strided_rows_in_bf16_with_a_scale_on_the_device(device: torch.device) -> None:
    logits, labels = inputs(5, 24, 2.0)
    logits = logits.bfloat16()
    expected_losses, expected_grad = exact(logits, labels, 0.125)
    rows = torch.full((5, 40), 7.0, dtype=torch.bfloat16, device=device)
    rows[:, 8:32] = logits
    losses, scale = torch.empty(5, device=device), torch.tensor(0.125, device=device)
    cross_entropy_grad_.triton(rows[:, 8:32], labels.to(device).int(), scale, losses)
    torch.testing.assert_close(losses.cpu().double(), expected_losses, rtol=1e-5, atol=1e-5)
    error = (rows[:, 8:32].cpu().double() - expected_grad).abs()
    assert (error <= expected_grad.abs() * 2**-7 + 1e-8).all()  # one bf16 step: the interpreter truncates
    assert (rows[:, :8] == 7).all()
    assert (rows[:, 32:] == 7).all()


@pytest.mark.parametrize("label", [0, 3])
def test_logits_of_minus_infinity_have_probability_zero(label: int, device: torch.device) -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, 3e38 if label == 3 else 1.5]])
    expected_losses, expected_grad = exact(logits, torch.tensor([label]), 1.0)
    losses, grad = torch.empty(1, device=device), logits.to(device)
    cross_entropy_grad_.triton(grad, torch.tensor([label], device=device), 1.0, losses)
    torch.testing.assert_close(losses.cpu().double(), expected_losses)
    torch.testing.assert_close(grad.cpu().double(), expected_grad)


def test_nan_logits_propagate(device: torch.device) -> None:
    logits, losses = torch.zeros(2, 5, device=device), torch.empty(2, device=device)
    logits[:, 2] = torch.nan
    cross_entropy_grad_.triton(logits, torch.tensor([1, -1], device=device), 1.0, losses)
    assert losses[0].isnan()
    assert logits[0].isnan().all()
    assert losses[1] == 0
    assert (logits[1] == 0).all()
