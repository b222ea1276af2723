"""RMSNorm in training: the reference against autograd, and edge cases of the kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward

pytest.importorskip("triton")

EPS = 1e-5


def inputs(n: int, c: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, x, weight, d_residual."""
    generator = torch.Generator().manual_seed(n + c)
    dy, x, d_residual = (torch.randn(n, c, generator=generator) for _ in range(3))
    return dy, x * scale, torch.randn(c, generator=generator), d_residual


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> bool:
    error = (actual.cpu().double() - expected.cpu().double()).abs()
    return bool((error <= tolerance * expected.abs().max().cpu()).all())


def exact_backward(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    dy, x, weight, d_residual = (x.double() for x in tensors)
    out, dweight = torch.empty_like(x), torch.empty_like(weight)
    rms_norm_backward.reference(dy, x, weight, EPS, d_residual, out, dweight, accumulate=False)
    return out, dweight


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3])
def test_reference_matches_autograd(scale: float) -> None:
    dy, x, weight, d_residual = (x.double() for x in inputs(7, 12, scale))
    x.requires_grad_()
    weight.requires_grad_()
    expected = F.rms_norm(x, (12,), weight, EPS)
    expected_dx, expected_dweight = torch.autograd.grad((expected * dy).sum(), (x, weight))
    x, weight = x.detach(), weight.detach()
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected.detach())
    out, dweight = torch.empty_like(x), torch.ones(12, dtype=torch.float64)
    rms_norm_backward(dy, x, weight, EPS, d_residual, out, dweight, accumulate=True)
    torch.testing.assert_close(out, expected_dx + d_residual)
    torch.testing.assert_close(dweight, expected_dweight + 1)
    rms_norm_backward(dy, x, weight, EPS, None, out, dweight, accumulate=False)
    torch.testing.assert_close(out, expected_dx)
    torch.testing.assert_close(dweight, expected_dweight)


@pytest.mark.parametrize("aliased", ["d_residual", "dy"])
def test_out_may_alias_an_input(aliased: str, device: torch.device) -> None:
    tensors = inputs(9, 600)
    expected, _ = exact_backward(tensors)
    dy, x, weight, d_residual = (x.to(device) for x in tensors)
    out = {"d_residual": d_residual, "dy": dy}[aliased]
    rms_norm_backward.triton(dy, x, weight, EPS, d_residual, out, torch.empty_like(weight), accumulate=False)
    assert close(out, expected)


def test_strided_rows_in_bf16_leave_padding_untouched(device: torch.device) -> None:
    tensors = [x.bfloat16() for x in inputs(6, 24)]
    padded = torch.full((6, 40), 7.0, dtype=torch.bfloat16, device=device)
    dy, x, d_residual, out, y = (padded.clone() for _ in range(5))
    for buffer, values in zip((dy, x, d_residual), (tensors[0], tensors[1], tensors[3]), strict=True):
        buffer[:, 8:32] = values
    weight, dweight = tensors[2].to(device), torch.ones(24, device=device)
    dy, x, d_residual, out_view, y_view = (buffer[:, 8:32] for buffer in (dy, x, d_residual, out, y))
    rms_norm.triton(x, weight, EPS, y_view)
    rms_norm_backward.triton(dy, x, weight, EPS, d_residual, out_view, dweight, accumulate=True)
    exact_out, exact_dweight = exact_backward(tuple(tensors))
    exact_y = rms_norm.reference(tensors[1].double(), tensors[2].double(), EPS)
    assert close(y_view, exact_y, 2**-7)  # one bf16 step: the interpreter truncates
    assert close(out_view, exact_out, 2**-7)
    assert close(dweight - 1, exact_dweight)
    for buffer in (out, y):
        assert (buffer[:, :8] == 7).all()
        assert (buffer[:, 32:] == 7).all()


def test_weight_gradients_accumulate_in_their_dtype(device: torch.device) -> None:
    tensors = inputs(4, 20)
    _, expected = exact_backward(tensors)
    dy, x, weight, _ = (x.to(device) for x in tensors)
    dweight = torch.full((20,), 3.0, dtype=torch.bfloat16, device=device)
    rms_norm_backward.triton(dy, x, weight, EPS, None, torch.empty_like(x), dweight, accumulate=True)
    assert close(dweight, expected + 3, 2**-7)


def test_sum_over_rows_is_deterministic(device: torch.device) -> None:
    dy, x, weight, d_residual = (x.to(device) for x in inputs(11, 1000, 1e3))
    first, second = (torch.full_like(weight, torch.nan) for _ in range(2))
    for dweight in (first, second):
        rms_norm_backward.triton(dy, x, weight, EPS, d_residual, torch.empty_like(x), dweight, accumulate=False)
    assert torch.equal(first, second)


def test_no_rows(device: torch.device) -> None:
    x, dweight = torch.empty(0, 8, device=device), torch.full((8,), 2.0, device=device)
    rms_norm.triton(x, torch.ones(8, device=device), EPS, x)
    rms_norm_backward.triton(x, x, torch.ones(8, device=device), EPS, None, x, dweight, accumulate=False)
    assert (dweight == 0).all()
