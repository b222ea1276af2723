"""The gated activation of a training step: plain torch against autograd, the kernels against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.swiglu import swiglu, swiglu_backward, swiglu_backward_reference, swiglu_reference

pytest.importorskip("triton")
from llmb.ops.activation.swiglu_triton import swiglu_backward_triton, swiglu_triton


def inputs(n: int, f: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """The activation's slope, and gate beside up."""
    generator = torch.Generator().manual_seed(n + f)
    return torch.randn(n, f, generator=generator), torch.randn(n, 2 * f, generator=generator) * size


def close(found: Tensor, wanted: Tensor, bound: float = 2e-6) -> bool:
    return bool(((found.cpu().double() - wanted).abs() <= bound * wanted.abs().max() + 1e-38).all())


def exact(dact: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The activation, and the slope of h."""
    dact, h = dact.double(), h.double()
    swiglu_backward_reference(dact, h)
    return dact, h


def test_plain_torch_gives_the_slopes_of_autograd() -> None:
    dact, h = (one.double() for one in inputs(5, 7, 3.0))
    watched = h.clone().requires_grad_()
    gate, up = watched.chunk(2, dim=-1)
    wanted = F.silu(gate) * up
    (wanted_slope,) = torch.autograd.grad((wanted * dact).sum(), watched)
    torch.testing.assert_close(swiglu(h), wanted.detach())
    swiglu_backward(dact, h)
    torch.testing.assert_close(h, wanted_slope)
    torch.testing.assert_close(dact, wanted.detach())


@pytest.mark.parametrize(("n", "f"), [(3, 10), (1, 1), (2, 2049), (17, 64)])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
def test_kernels_give_what_torch_gives(n: int, f: int, size: float, device: torch.device) -> None:
    dact, h = inputs(n, f, size)
    exact_act, exact_slope = exact(dact, h)
    act, dact, h = torch.full((n, f), torch.nan, device=device), dact.to(device), h.to(device)
    swiglu_triton(h, act)
    assert close(act, exact_act)
    before, again = dact.clone(), h.clone()
    swiglu_backward_triton(dact, h)
    assert close(h, exact_slope)
    assert close(dact, exact_act)
    swiglu_backward_triton(before, again, again=False)
    assert torch.equal(again, h)
    assert torch.equal(before.cpu(), inputs(n, f, size)[0])


@pytest.mark.parametrize("gate", [-3e38, -1e4, 1e4, 3e38])
def test_gates_far_out_are_open_or_shut(gate: float, device: torch.device) -> None:
    dact, h = torch.ones(1, 1, device=device), torch.tensor([[gate, 1.0]], device=device)
    swiglu_backward_triton(dact, h)
    assert dact.item() == max(gate, 0.0) or dact.item() == pytest.approx(gate)
    assert h.tolist()[0] == [1.0 if gate > 0 else 0.0, dact.item()]


def test_rows_may_lie_apart_in_bf16_and_nothing_between_them_is_touched(device: torch.device) -> None:
    dact, h = (one.bfloat16() for one in inputs(4, 24))
    exact_act, exact_slope = exact(dact, h)
    wide_dact, wide_h, wide_out = (torch.full((4, 64), 7.0, dtype=torch.bfloat16, device=device) for _ in range(3))
    wide_dact[:, 8:32], wide_h[:, 8:56] = dact, h
    swiglu_triton(wide_h[:, 8:56], wide_out[:, 8:32])
    swiglu_backward_triton(wide_dact[:, 8:32], wide_h[:, 8:56])
    assert close(wide_out[:, 8:32], exact_act, 2**-7)  # a bf16 number; the interpreter cuts off
    assert close(wide_dact[:, 8:32], exact_act, 2**-7)
    assert close(wide_h[:, 8:56], exact_slope, 2**-7)
    for room, end in ((wide_dact, 32), (wide_out, 32), (wide_h, 56)):
        assert (room[:, :8] == 7).all()
        assert (room[:, end:] == 7).all()


def test_the_result_is_written_where_it_is_wanted() -> None:
    _, h = inputs(3, 8)
    out, wanted = torch.empty(3, 8), torch.empty(3, 8)
    swiglu_reference(h, wanted)
    assert swiglu(h, out=out) is out
    assert torch.equal(out, wanted)
    assert torch.equal(swiglu(h), wanted)
