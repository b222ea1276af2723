"""Rotary positions in place: plain torch against the rotation with a new tensor, the kernel against plain torch."""

import pytest
import torch
from torch import Tensor

from llmb.ops.rope.rope import rotate, rotate_in_place, rotate_into_reference

pytest.importorskip("triton")
from llmb.ops.rope.rope_triton import rotate_into_triton

BETWEEN = 7.0  # what lies around the heads


def inputs(n: int, h: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads, cosine, sine."""
    generator = torch.Generator().manual_seed(n + h + d)
    angle = torch.rand(n, d // 2, generator=generator) * 1000
    return torch.randn(n, h, d, generator=generator), angle.cos(), angle.sin()


def inside_rows(x_NHD: Tensor, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Wider rows, and these heads inside them."""
    n, h, d = x_NHD.shape
    rows = torch.full((n, before + h * d + after), BETWEEN, dtype=x_NHD.dtype, device=x_NHD.device)
    view = rows[:, before : before + h * d].unflatten(1, (h, d))
    view.copy_(x_NHD)
    return rows, view


@pytest.mark.parametrize(("n", "h", "d"), [(3, 2, 8), (1, 1, 2), (5, 5, 64), (2, 20, 96), (4, 40, 16)])
def test_the_kernel_turns_as_torch_does_and_turns_back(n: int, h: int, d: int, device: torch.device) -> None:
    x, cos, sin = (one.to(device) for one in inputs(n, h, d))
    rows, view = inside_rows(x, 8, 24)
    rotate_into_triton(view, view, cos, sin, inverse=False)
    torch.testing.assert_close(view, rotate(x, cos, sin))
    rotate_into_triton(view, view, cos, sin, inverse=True)
    torch.testing.assert_close(view, x)
    assert (rows[:, :8] == BETWEEN).all()
    assert (rows[:, -24:] == BETWEEN).all()


def test_plain_torch_turns_in_place_and_back() -> None:
    x, cos, sin = inputs(3, 4, 10)
    rows, view = inside_rows(x, 1, 2)
    rotate_in_place(view, cos, sin)
    assert torch.equal(view, rotate(x, cos, sin))
    rotate_in_place(view, cos, sin, inverse=True)
    torch.testing.assert_close(view, x)
    assert (rows[:, 0] == BETWEEN).all()


def test_heads_may_be_turned_on_their_way_elsewhere(device: torch.device) -> None:
    x, cos, sin = (one.to(device) for one in inputs(5, 4, 16))
    untouched, (rows, view) = x.clone(), inside_rows(torch.zeros_like(x), 8, 24)
    for rotate_into in (rotate_into_triton, rotate_into_reference):
        rotate_into(view, x, cos, sin, True)
        torch.testing.assert_close(view, rotate(x, cos, -sin))
        assert torch.equal(x, untouched)
        assert (rows[:, -24:] == BETWEEN).all()


def test_the_inverse_is_the_slope_through_a_rotation() -> None:
    x, cos, sin = inputs(3, 4, 10)
    x.requires_grad_()
    slope = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0))
    (wanted,) = torch.autograd.grad((rotate(x, cos, sin) * slope).sum(), x)
    rotate_into_reference(slope, slope, cos, sin, inverse=True)
    torch.testing.assert_close(slope, wanted)


def test_bf16_is_rounded_once(device: torch.device) -> None:
    x, cos, sin = inputs(4, 3, 32)
    x = x.bfloat16()
    exact = rotate(x.double(), cos.double(), sin.double())
    plain, found = x.clone(), x.to(device)
    rotate_into_reference(plain, plain, cos, sin)
    rotate_into_triton(found, found, cos.to(device), sin.to(device), inverse=False)
    assert ((plain.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert ((found.cpu().double() - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()  # the interpreter cuts off


def test_tables_may_be_parts_of_wider_ones(device: torch.device) -> None:
    x, cos, sin = (one.to(device) for one in inputs(4, 3, 32))
    both = torch.cat((cos, sin), dim=1)
    found = x.clone()
    rotate_into_triton(found, found, both[:, :16], both[:, 16:], inverse=False)
    torch.testing.assert_close(found, rotate(x, cos, sin))


def test_no_rows_are_no_work(device: torch.device) -> None:
    x, cos, sin = (one.to(device) for one in inputs(0, 3, 32))
    rotate_into_triton(x, x, cos, sin, inverse=False)
