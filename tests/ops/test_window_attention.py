"""Attention of whole sequences with a sliding window and sinks, forward and backward, against plain autograd."""

import pytest
import torch
from seeded_tensors import relative_error
from torch import Tensor

from llmb.ops.attention.window_attention import window_attention


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks_H: Tensor) -> Tensor:
    """The sink is one more key, whose value is zero."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    row = torch.arange(q.shape[2])
    distance = row[:, None] - row
    visible = (distance >= 0) & (distance < (window or q.shape[2]))
    logits = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    sinks = sinks_H[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("window", [None, 1, 5])
def test_sinks_and_window_match_plain_autograd(window: int | None) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = ((2, 6, 13, 8), (2, 2, 13, 8), (2, 2, 13, 8), (6,))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    dout = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    out = window_attention(*leaves[:3], 0.3, window, leaves[3])
    expected = plain_attention(*leaves[:3], 0.3, window, leaves[3])
    assert relative_error(out, expected) < 1e-10
    for actual, gradient in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        assert relative_error(actual, gradient) < 1e-10
