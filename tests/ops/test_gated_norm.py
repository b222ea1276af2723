"""Gated RMSNorm: the reference against its definition, and the kernels on strided bf16."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.norm.gated_norm import gated_norm

pytest.importorskip("triton")


def inputs(batch: int, tokens: int, groups: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((batch, tokens, groups * width), (batch, tokens, groups, width), (groups * width,))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def with_gradients(implementation, tensors: list[Tensor], eps: float) -> list[Tensor]:
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = implementation(*tensors, eps)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


def test_reference_normalizes_each_group() -> None:
    y, gate, weight = inputs(2, 3, 3, 4)
    out = gated_norm(y, gate, weight, 1e-6)
    for group in range(3):
        channels = slice(4 * group, 4 * group + 4)
        gated = y[..., channels] * F.silu(gate[:, :, group])
        expected = gated / (gated.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight[channels]
        torch.testing.assert_close(out[..., channels], expected)


@pytest.mark.slow
def test_kernels_take_a_bf16_slice_with_fp32_weights(device: torch.device) -> None:
    y, gate, weight = (x.to(device) for x in inputs(2, 5, 2, 20))
    doubled = torch.cat((gate, gate), dim=-1).bfloat16()
    tensors = [y.bfloat16(), doubled[..., 20:], weight]
    actual = with_gradients(gated_norm.triton, tensors, 1e-5)
    exact = with_gradients(gated_norm.reference, [x.double().cpu() for x in tensors], 1e-5)
    assert [x.dtype for x in actual] == [torch.bfloat16] * 3 + [torch.float32]
    for x, expected in zip(actual, exact, strict=True):
        # One bf16 step: the interpreter truncates.
        assert (x.cpu().double() - expected).norm() / expected.norm() < 2**-7
