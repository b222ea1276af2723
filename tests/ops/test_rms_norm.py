"""The norm of a training step: plain torch against autograd, the kernels against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.norm.rms_norm import (
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_reference,
    rms_norm_reference,
)

pytest.importorskip("triton")
from llmb.ops.norm.rms_norm_triton import rms_norm_backward_triton, rms_norm_triton

EPS = 1e-5
SHAPES = [(5, 12), (1, 64), (11, 1000), (3, 1), (70, 20)]  # several rows a program, several turns, one channel


def inputs(n: int, c: int, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, x, weight, dresidual."""
    generator = torch.Generator().manual_seed(n + c)
    dy, x, dresidual = (torch.randn(n, c, generator=generator) for _ in range(3))
    return dy, x * size, torch.randn(c, generator=generator), dresidual


def close(found: Tensor, wanted: Tensor, bound: float = 2e-5) -> bool:
    return bool(((found.cpu().double() - wanted.cpu().double()).abs() <= bound * wanted.abs().max().cpu()).all())


@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
def test_plain_torch_gives_the_slopes_of_autograd(size: float) -> None:
    dy, x, weight, dresidual = (one.double() for one in inputs(7, 12, size))
    x.requires_grad_()
    weight.requires_grad_()
    wanted = F.rms_norm(x, (12,), weight, EPS)
    wanted_dx, wanted_dweight = torch.autograd.grad((wanted * dy).sum(), (x, weight))
    x, weight = x.detach(), weight.detach()
    torch.testing.assert_close(rms_norm(x, weight, EPS), wanted.detach())
    out, dweight = torch.empty_like(x), torch.ones(12, dtype=torch.float64)
    rms_norm_backward(dy, x, weight, EPS, dresidual, out, dweight, False)
    torch.testing.assert_close(out, wanted_dx + dresidual)
    torch.testing.assert_close(dweight, wanted_dweight + 1)
    rms_norm_backward(dy, x, weight, EPS, None, out, dweight, True)
    torch.testing.assert_close(out, wanted_dx)
    torch.testing.assert_close(dweight, wanted_dweight)


@pytest.mark.parametrize(("n", "c"), SHAPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
def test_kernels_give_what_torch_gives(n: int, c: int, size: float, device: torch.device) -> None:
    tensors = inputs(n, c, size)
    _, x, weight, _ = (one.to(device) for one in tensors)
    y, exact_y = torch.full_like(x, torch.nan), torch.empty(n, c, dtype=torch.float64)
    rms_norm_triton(x, weight, EPS, y)
    rms_norm_reference(tensors[1].double(), tensors[2].double(), EPS, exact_y)
    assert close(y, exact_y)
    for found, wanted in zip(backward_of_kernels(tensors, device), backward_of_torch(tensors), strict=True):
        assert close(found, wanted)


def backward_of_torch(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    dy, x, weight, dresidual = (one.double() for one in tensors)
    out, dweight = torch.empty_like(x), torch.empty_like(weight)
    rms_norm_backward_reference(dy, x, weight, EPS, dresidual, out, dweight, True)
    return out, dweight


def backward_of_kernels(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    dy, x, weight, dresidual = (one.to(device) for one in tensors)
    out, dweight = torch.full_like(x, torch.nan), torch.full_like(weight, torch.nan)
    rms_norm_backward_triton(dy, x, weight, EPS, dresidual, out, dweight, True)
    return out, dweight


@pytest.mark.parametrize("over", ["dresidual", "dy"])
def test_slopes_may_be_written_over_what_came_in(over: str, device: torch.device) -> None:
    tensors = inputs(9, 600)
    wanted, _ = backward_of_torch(tensors)
    dy, x, weight, dresidual = (one.to(device) for one in tensors)
    out = {"dresidual": dresidual, "dy": dy}[over]
    rms_norm_backward_triton(dy, x, weight, EPS, dresidual, out, torch.empty_like(weight), True)
    assert close(out, wanted)


def test_rows_may_lie_apart_in_bf16_and_nothing_between_them_is_touched(device: torch.device) -> None:
    tensors = [one.bfloat16() for one in inputs(6, 24)]
    wide = torch.full((6, 40), 7.0, dtype=torch.bfloat16, device=device)
    dy, x, dresidual, out, y = (wide.clone() for _ in range(5))
    for room, one in zip((dy, x, dresidual), (tensors[0], tensors[1], tensors[3]), strict=True):
        room[:, 8:32] = one
    weight, dweight = tensors[2].to(device), torch.ones(24, device=device)
    dy, x, dresidual, out_view, y_view = (one[:, 8:32] for one in (dy, x, dresidual, out, y))
    rms_norm_triton(x, weight, EPS, y_view)
    rms_norm_backward_triton(dy, x, weight, EPS, dresidual, out_view, dweight, False)
    exact_out, exact_dweight = backward_of_torch(tuple(tensors))
    exact_y = torch.empty(6, 24, dtype=torch.float64)
    rms_norm_reference(tensors[1].double(), tensors[2].double(), EPS, exact_y)
    assert close(y_view, exact_y, 2**-7)  # a bf16 number; the interpreter cuts off
    assert close(out_view, exact_out, 2**-7)
    assert close(dweight - 1, exact_dweight)
    for room in (out, y):
        assert (room[:, :8] == 7).all()
        assert (room[:, 32:] == 7).all()


def test_slopes_of_weights_are_added_in_the_format_they_have(device: torch.device) -> None:
    tensors = inputs(4, 20)
    _, wanted = backward_of_torch(tensors)
    dy, x, weight, _ = (one.to(device) for one in tensors)
    dweight = torch.full((20,), 3.0, dtype=torch.bfloat16, device=device)
    rms_norm_backward_triton(dy, x, weight, EPS, None, torch.empty_like(x), dweight, False)
    assert close(dweight, wanted + 3, 2**-7)


def test_the_sum_over_rows_is_the_same_every_time(device: torch.device) -> None:
    tensors = inputs(11, 1000, 1e3)
    first, again = (backward_of_kernels(tensors, device)[1] for _ in range(2))
    assert torch.equal(first, again)


def test_no_rows_have_no_slope(device: torch.device) -> None:
    x, dweight = torch.empty(0, 8, device=device), torch.full((8,), 2.0, device=device)
    rms_norm_triton(x, torch.ones(8, device=device), EPS, x)
    rms_norm_backward_triton(x, x, torch.ones(8, device=device), EPS, None, x, dweight, True)
    assert (dweight == 0).all()
