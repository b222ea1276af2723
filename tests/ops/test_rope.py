"""RoPE in place: the reference against the version with a new tensor and autograd; its kernel: op_cases/rope.py."""

import torch
from torch import Tensor

from llmb.ops.rope.rope import apply_rope, apply_rope_, apply_rope_out

PADDING = 7.0


def inputs(n: int, h: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads, cosine, sine."""
    generator = torch.Generator().manual_seed(n + h + d)
    angle = torch.rand(n, d // 2, generator=generator) * 1000
    return torch.randn(n, h, d, generator=generator), angle.cos(), angle.sin()


def inside_rows(x_NHD: Tensor, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Wider rows, and a view of these heads inside them."""
    n, h, d = x_NHD.shape
    rows = torch.full((n, before + h * d + after), PADDING, dtype=x_NHD.dtype, device=x_NHD.device)
    view = rows[:, before : before + h * d].unflatten(1, (h, d))
    view.copy_(x_NHD)
    return rows, view


def test_reference_in_place_and_inverse() -> None:
    x, cos, sin = inputs(3, 4, 10)
    rows, view = inside_rows(x, 1, 2)
    apply_rope_(view, cos, sin)
    assert torch.equal(view, apply_rope(x, cos, sin))
    apply_rope_(view, cos, sin, inverse=True)
    torch.testing.assert_close(view, x)
    assert (rows[:, 0] == PADDING).all()


def test_inverse_is_the_backward() -> None:
    x, cos, sin = inputs(3, 4, 10)
    x.requires_grad_()
    grad = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad((apply_rope(x, cos, sin) * grad).sum(), x)
    apply_rope_out.reference(grad, grad, cos, sin, inverse=True)
    torch.testing.assert_close(grad, expected)


def test_bf16_is_rounded_once() -> None:
    x, cos, sin = inputs(4, 3, 32)
    x = x.bfloat16()
    exact = apply_rope(x.double(), cos.double(), sin.double())
    apply_rope_out.reference(x, x, cos, sin)
    assert ((x.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
