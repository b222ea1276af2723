"""RMSNorm in training: the reference against autograd; its kernels: op_cases/norm.py."""

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


def test_sum_over_rows_is_deterministic(device: torch.device) -> None:
    dy, x, weight, d_residual = (x.to(device) for x in inputs(11, 1000, 1e3))
    first, second = (torch.full_like(weight, torch.nan) for _ in range(2))
    for dweight in (first, second):
        rms_norm_backward.triton(dy, x, weight, EPS, d_residual, torch.empty_like(x), dweight, accumulate=False)
    assert torch.equal(first, second)
