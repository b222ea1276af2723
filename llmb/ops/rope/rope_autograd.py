"""RoPE as an autograd function: one pass over the heads forward, and one backward.

    q_BTHD = fused_rope(q_BTHD, cos_TD, sin_TD)

The backward is the inverse rotation, so only the tables are saved, which all layers share. `rope.apply_rope` is the
plain version, of several passes. Shapes: B sequences, T tokens, H heads, D head width; cosine and sine are [T, D / 2],
in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmb.ops.rope.rope import apply_rope_out
from llmb.ops.tensor_layout import dense_rows


class RopeFunction(torch.autograd.Function):
    """Heads rotated by a function with a parameter `inverse`, which the backward sets."""

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor, rope: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        ctx.rope = rope
        return rope(x_BTHD, cos_TD, sin_TD, inverse=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor, None, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return ctx.rope(grad_BTHD, cos_TD, sin_TD, inverse=True), None, None, None


def fused_rope(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head, computed in fp32 and rounded once."""
    return RopeFunction.apply(x_BTHD, cos_TD, sin_TD, _rope)


def _rope(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor, inverse: bool) -> Tensor:
    """Sequence by sequence: gradients have the layout that attention leaves, possibly heads before tokens."""
    x_BTHD = dense_rows(x_BTHD)
    out_BTHD = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    for out_THD, x_THD in zip(out_BTHD, x_BTHD, strict=True):
        apply_rope_out(out_THD, x_THD, cos_TD, sin_TD, inverse)
    return out_BTHD
