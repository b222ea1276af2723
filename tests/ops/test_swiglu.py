"""SwiGLU in training: the reference against autograd, and edge cases of the kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.activation import activation_backward, swiglu, swiglu_backward

pytest.importorskip("triton")


def inputs(n: int, f: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Gradient of the activation, and gate beside up."""
    generator = torch.Generator().manual_seed(n + f)
    return torch.randn(n, f, generator=generator), torch.randn(n, 2 * f, generator=generator) * scale


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> bool:
    return bool(((actual.cpu().double() - expected).abs() <= tolerance * expected.abs().max() + 1e-38).all())


def exact(dact: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The activation, and the gradient of h."""
    dact, h = dact.double(), h.double()
    gate, up = h.chunk(2, dim=-1)
    activation_backward.reference(dact, gate, "silu", up, (gate, up), recompute=True)
    return dact, h


def test_reference_matches_autograd() -> None:
    dact, h = (x.double() for x in inputs(5, 7, 3.0))
    leaf = h.clone().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    (expected_dh,) = torch.autograd.grad((expected * dact).sum(), leaf)
    torch.testing.assert_close(swiglu(h), expected.detach())
    swiglu_backward(dact, h)
    torch.testing.assert_close(h, expected_dh)
    torch.testing.assert_close(dact, expected.detach())


def test_without_recompute_dact_is_unchanged(force_kernels: None, device: torch.device) -> None:
    dact, h = (x.to(device) for x in inputs(17, 64))
    dact_before, dh = dact.clone(), h.clone()
    swiglu_backward(dact, dh, recompute=False)
    assert torch.equal(dact, dact_before)
    swiglu_backward(dact, h)
    assert torch.equal(dh, h)


@pytest.mark.parametrize("gate", [-3e38, -1e4, 1e4, 3e38])
def test_gates_saturate(gate: float, force_kernels: None, device: torch.device) -> None:
    dact, h = torch.ones(1, 1, device=device), torch.tensor([[gate, 1.0]], device=device)
    swiglu_backward(dact, h)
    assert dact.item() == max(gate, 0.0) or dact.item() == pytest.approx(gate)
    assert h.tolist()[0] == [1.0 if gate > 0 else 0.0, dact.item()]


def test_strided_rows_in_bf16_leave_padding_untouched(force_kernels: None, device: torch.device) -> None:
    dact, h = (x.bfloat16() for x in inputs(4, 24))
    exact_act, exact_dh = exact(dact, h)
    padded_dact, padded_h, padded_out = (
        torch.full((4, 64), 7.0, dtype=torch.bfloat16, device=device) for _ in range(3)
    )
    padded_dact[:, 8:32], padded_h[:, 8:56] = dact, h
    swiglu(padded_h[:, 8:56], padded_out[:, 8:32])
    swiglu_backward(padded_dact[:, 8:32], padded_h[:, 8:56])
    assert close(padded_out[:, 8:32], exact_act, 2**-7)  # one bf16 step: the interpreter truncates
    assert close(padded_dact[:, 8:32], exact_act, 2**-7)
    assert close(padded_h[:, 8:56], exact_dh, 2**-7)
    for buffer, end in ((padded_dact, 32), (padded_out, 32), (padded_h, 56)):
        assert (buffer[:, :8] == 7).all()
        assert (buffer[:, end:] == 7).all()


def test_output_is_written_to_out() -> None:
    _, h = inputs(3, 8)
    out = torch.empty(3, 8)
    assert swiglu(h, out=out) is out
    assert torch.equal(swiglu(h), out)
