"""The loss and its slope over the logits: plain torch against autograd, the kernel against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.loss.cross_entropy import cross_entropy_slope_, cross_entropy_slope_reference_

pytest.importorskip("triton")
from llmb.ops.loss.cross_entropy_triton import TILE, cross_entropy_slope_triton_


def inputs(n: int, v: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits, and labels of which every third says that its row does not count."""
    generator = torch.Generator().manual_seed(n + v)
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[2::3] = -100
    return torch.randn(n, v, generator=generator) * size, labels


def exact(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Losses and slope."""
    slope, losses = logits.double(), torch.empty(len(labels), dtype=torch.float64)
    cross_entropy_slope_reference_(slope, labels, scale, losses)
    return losses, slope


def test_plain_torch_gives_the_loss_and_slope_of_autograd() -> None:
    logits, labels = inputs(8, 11, 3.0)
    watched = logits.double().requires_grad_()
    wanted = F.cross_entropy(watched, labels, reduction="none", ignore_index=-100)
    (wanted_slope,) = torch.autograd.grad(wanted.sum() * 0.25, watched)
    slope, losses = logits.double(), torch.empty(8, dtype=torch.float64)
    cross_entropy_slope_(slope, labels, 0.25, losses)
    torch.testing.assert_close(losses, wanted.detach())
    torch.testing.assert_close(slope, wanted_slope)


@pytest.mark.parametrize(("n", "v"), [(4, 10), (1, 1), (3, 1003), (3, TILE), (4, 2 * TILE + 5)])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
def test_the_kernel_gives_what_torch_gives(n: int, v: int, size: float, device: torch.device) -> None:
    logits, labels = inputs(n, v, size)
    wanted_losses, wanted_slope = exact(logits, labels, 0.5)
    losses, slope = torch.full((n,), torch.nan, device=device), logits.to(device)
    cross_entropy_slope_triton_(slope, labels.to(device), 0.5, losses)
    bound = 1e-6 * (1 + size)  # of rounding logits of this size
    assert ((losses.cpu() - wanted_losses).abs() <= bound * 10).all()
    assert ((slope.cpu() - wanted_slope).abs() <= bound).all()


def test_rows_may_lie_apart_in_bf16_and_the_scale_on_the_device(device: torch.device) -> None:
    logits, labels = inputs(5, 24, 2.0)
    logits = logits.bfloat16()
    wanted_losses, wanted_slope = exact(logits, labels, 0.125)
    rows = torch.full((5, 40), 7.0, dtype=torch.bfloat16, device=device)
    rows[:, 8:32] = logits
    losses, scale = torch.empty(5, device=device), torch.tensor(0.125, device=device)
    cross_entropy_slope_triton_(rows[:, 8:32], labels.to(device).int(), scale, losses)
    torch.testing.assert_close(losses.cpu().double(), wanted_losses, rtol=1e-5, atol=1e-5)
    error = (rows[:, 8:32].cpu().double() - wanted_slope).abs()
    assert (error <= wanted_slope.abs() * 2**-7 + 1e-8).all()  # a bf16 number; the interpreter cuts off
    assert (rows[:, :8] == 7).all()
    assert (rows[:, 32:] == 7).all()


@pytest.mark.parametrize("label", [0, 3])
def test_words_that_cannot_be_said_weigh_nothing(label: int, device: torch.device) -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, 3e38 if label == 3 else 1.5]])
    wanted_losses, wanted_slope = exact(logits, torch.tensor([label]), 1.0)
    losses, slope = torch.empty(1, device=device), logits.to(device)
    cross_entropy_slope_triton_(slope, torch.tensor([label], device=device), 1.0, losses)
    torch.testing.assert_close(losses.cpu().double(), wanted_losses)
    torch.testing.assert_close(slope.cpu().double(), wanted_slope)


def test_a_logit_that_is_no_number_is_not_hidden(device: torch.device) -> None:
    logits, losses = torch.zeros(2, 5, device=device), torch.empty(2, device=device)
    logits[:, 2] = torch.nan
    cross_entropy_slope_triton_(logits, torch.tensor([1, -1], device=device), 1.0, losses)
    assert losses[0].isnan()
    assert logits[0].isnan().all()
    assert losses[1] == 0
    assert (logits[1] == 0).all()
