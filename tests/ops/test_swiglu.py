"""SwiGLU in training: the reference against autograd; its kernels: op_cases/activation.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.activation import swiglu, swiglu_backward


def inputs(n: int, f: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Gradient of the activation, and gate beside up."""
    generator = torch.Generator().manual_seed(n + f)
    return torch.randn(n, f, generator=generator), torch.randn(n, 2 * f, generator=generator) * scale


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


def test_output_is_written_to_out() -> None:
    _, h = inputs(3, 8)
    out = torch.empty(3, 8)
    assert swiglu(h, out=out) is out
    assert torch.equal(swiglu(h), out)
