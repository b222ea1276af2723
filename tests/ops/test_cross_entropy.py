"""Cross-entropy with its gradient over the logits: the reference against autograd, and edge cases of the kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.loss.cross_entropy import cross_entropy_grad_, vocab_parallel_grad_, vocab_parallel_logsumexp

pytest.importorskip("triton")
from llmb.ops.loss.cross_entropy_triton import TILE, VOCAB_PARALLEL_TILE


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


@pytest.mark.parametrize("v", [10, 2 * VOCAB_PARALLEL_TILE + 5])
@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.usefixtures("force_kernels")
def test_vocab_parallel_kernels_match_the_whole_vocabulary(v: int, scale: float, device: torch.device) -> None:
    logits, labels = inputs(3, v, scale)
    labels = torch.tensor([2, 3, v - 1])
    expected_losses, expected_grad = exact(logits, labels, 0.5)
    losses, grad = vocab_parallel(logits.to(device), labels.to(device), [0, 3], 0.5)
    tolerance = 1e-6 * (1 + scale)
    assert ((losses.cpu() - expected_losses).abs() <= tolerance * 10).all()
    assert ((grad.cpu() - expected_grad).abs() <= tolerance).all()


@pytest.mark.usefixtures("force_kernels")
def test_vocab_parallel_kernels_in_bf16(device: torch.device) -> None:
    logits, labels = inputs(5, 24, 2.0)
    logits, labels = logits.bfloat16(), labels.abs() % 24
    expected_losses, expected_grad = exact(logits, labels, 0.125)
    losses, grad = vocab_parallel(logits.to(device), labels.to(device).int(), [0, 8], 0.125)
    torch.testing.assert_close(losses.cpu().double(), expected_losses, rtol=1e-5, atol=1e-5)
    error = (grad.cpu().double() - expected_grad).abs()
    assert (error <= expected_grad.abs() * 2**-7 + 1e-8).all()  # one bf16 step: the interpreter truncates


@pytest.mark.usefixtures("force_kernels")
def test_vocab_parallel_range_of_minus_infinity_has_probability_zero(device: torch.device) -> None:
    logits, labels = torch.tensor([[-torch.inf, -torch.inf, 1.0, 2.0]]), torch.tensor([3])
    expected_losses, expected_grad = exact(logits, labels, 1.0)
    losses, grad = vocab_parallel(logits.to(device), labels.to(device), [0, 2], 1.0)
    torch.testing.assert_close(losses.cpu().double(), expected_losses)
    torch.testing.assert_close(grad.cpu().double(), expected_grad)


@pytest.mark.usefixtures("force_kernels")
def test_vocab_parallel_nan_propagates_to_all_ranges(device: torch.device) -> None:
    logits = torch.tensor([[0.0, torch.nan, 0.0, 0.0]], device=device)
    losses, grad = vocab_parallel(logits, torch.tensor([3], device=device), [0, 2], 1.0)
    assert losses.isnan().all()
    assert grad.isnan().all()
