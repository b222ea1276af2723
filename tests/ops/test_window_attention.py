"""Attention of whole sequences with a sliding window and sinks, forward and backward, against plain autograd.

On a GPU FlashAttention computes the window: in bf16, compared with fp32.
"""

import pytest
import torch
from seeded_tensors import relative_error
from torch import Tensor

from llmb.ops.attention.window_attention import window_attention

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks_H: Tensor | None
) -> Tensor:
    """The sink is one more key, whose value is zero."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    row = torch.arange(q.shape[2], device=q.device)
    distance = row[:, None] - row
    visible = (distance >= 0) & (distance < (window or q.shape[2]))
    logits = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    if sinks_H is None:
        return logits.softmax(-1) @ v
    sinks = sinks_H[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize(
    ("window", "tokens", "head_dim", "has_sinks"),
    [
        *((window, 13, 8, True) for window in (None, 1, 5)),
        *(
            pytest.param(window, 1024, head_dim, False, marks=[pytest.mark.gpu, needs_gpu])
            for window in (2, 100, 512)
            for head_dim in (64, 128, 256)
        ),
    ],
)
def test_sinks_and_window_match_plain_autograd(
    window: int | None, tokens: int, head_dim: int, has_sinks: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(4)
    heads, scale, exact, fast, bound = 6, 0.3, torch.float64, torch.float64, 1e-10
    if tokens == 1024:
        heads, scale, exact, fast, bound = 8, 0.1, torch.float32, torch.bfloat16, 0.01
    else:
        device = torch.device("cpu")
    shapes = [(2, count, tokens, head_dim) for count in (heads, 2, 2, heads)]
    *qkv, dout = (torch.randn(shape, generator=generator, dtype=exact).to(device, fast) for shape in shapes)
    inputs = [*qkv, torch.randn(heads, generator=generator, dtype=exact)] if has_sinks else qkv
    leaves, exact_leaves = ([x.to(dtype, copy=True).requires_grad_() for x in inputs] for dtype in (fast, exact))
    sinks, exact_sinks = (each[3] if has_sinks else None for each in (leaves, exact_leaves))
    out = window_attention(*leaves[:3], scale, window, sinks)
    expected = plain_attention(*exact_leaves[:3], scale, window, exact_sinks)
    actual = (out, *torch.autograd.grad(out, leaves, dout))
    for tensor, reference in zip(
        actual, (expected, *torch.autograd.grad(expected, exact_leaves, dout.to(exact))), strict=True
    ):
        assert relative_error(tensor, reference) < bound
