"""RoPE in place: the reference against the version with a new tensor and autograd, and edge cases of the kernel."""

import pytest
import torch
from torch import Tensor

from llmb.ops.rope.rope import apply_rope, apply_rope_, apply_rope_out

pytest.importorskip("triton")

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


@pytest.mark.parametrize(("n", "h", "d"), [(3, 2, 8), (1, 1, 2), (5, 5, 64), (2, 20, 96), (4, 40, 16)])
def test_kernel_in_place_and_inverse(n: int, h: int, d: int, device: torch.device) -> None:
    x, cos, sin = (x.to(device) for x in inputs(n, h, d))
    rows, view = inside_rows(x, 8, 24)
    apply_rope_out.triton(view, view, cos, sin, inverse=False)
    torch.testing.assert_close(view, apply_rope(x, cos, sin))
    apply_rope_out.triton(view, view, cos, sin, inverse=True)
    torch.testing.assert_close(view, x)
    assert (rows[:, :8] == PADDING).all()
    assert (rows[:, -24:] == PADDING).all()


def test_reference_in_place_and_inverse() -> None:
    x, cos, sin = inputs(3, 4, 10)
    rows, view = inside_rows(x, 1, 2)
    apply_rope_(view, cos, sin)
    assert torch.equal(view, apply_rope(x, cos, sin))
    apply_rope_(view, cos, sin, inverse=True)
    torch.testing.assert_close(view, x)
    assert (rows[:, 0] == PADDING).all()


def test_out_of_place_leaves_input_and_padding_untouched(device: torch.device) -> None:
    x, cos, sin = (x.to(device) for x in inputs(5, 4, 16))
    x_before, (rows, view) = x.clone(), inside_rows(torch.zeros_like(x), 8, 24)
    for implementation in (apply_rope_out.triton, apply_rope_out.reference):
        implementation(view, x, cos, sin, True)
        torch.testing.assert_close(view, apply_rope(x, cos, -sin))
        assert torch.equal(x, x_before)
        assert (rows[:, -24:] == PADDING).all()


def test_inverse_is_the_backward() -> None:
    x, cos, sin = inputs(3, 4, 10)
    x.requires_grad_()
    grad = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad((apply_rope(x, cos, sin) * grad).sum(), x)
    apply_rope_out.reference(grad, grad, cos, sin, inverse=True)
    torch.testing.assert_close(grad, expected)


def test_bf16_is_rounded_once(device: torch.device) -> None:
    x, cos, sin = inputs(4, 3, 32)
    x = x.bfloat16()
    exact = apply_rope(x.double(), cos.double(), sin.double())
    reference, kernel = x.clone(), x.to(device)
    apply_rope_out.reference(reference, reference, cos, sin)
    apply_rope_out.triton(kernel, kernel, cos.to(device), sin.to(device), inverse=False)
    assert ((reference.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert ((kernel.cpu().double() - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()  # the interpreter truncates


def test_tables_may_have_a_row_stride(device: torch.device) -> None:
    x, cos, sin = (x.to(device) for x in inputs(4, 3, 32))
    tables = torch.cat((cos, sin), dim=1)
    out = x.clone()
    apply_rope_out.triton(out, out, tables[:, :16], tables[:, 16:], inverse=False)
    torch.testing.assert_close(out, apply_rope(x, cos, sin))


def test_no_rows(device: torch.device) -> None:
    x, cos, sin = (x.to(device) for x in inputs(0, 3, 32))
    apply_rope_out.triton(x, x, cos, sin, inverse=False)
