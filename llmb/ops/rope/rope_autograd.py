"""Rotary positions as a step of autograd: one pass over the heads there, and one back.

    q_BTHD = rotated(q_BTHD, cos_TD, sin_TD)

A slope goes back through a rotation by turning the other way, so nothing is kept but the tables, which all layers
share. `rotation.rotate` is the plain form, of several passes. Shapes: B sequences, T tokens, H heads, D width of a
head; cosine and sine are [T, D / 2], in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmb.ops.dense_rows import dense_rows
from llmb.ops.rope.rope import rotate_into


class Turned(torch.autograd.Function):
    """Heads turned by any function that also turns back: it is told whether to."""

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor, turn: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        ctx.turn = turn
        return turn(x_BTHD, cos_TD, sin_TD, inverse=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor, None, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return ctx.turn(grad_BTHD, cos_TD, sin_TD, inverse=True), None, None, None


def rotated(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """The pairs (i, i + D/2) of each head turned by their position's angle, in fp32 and rounded once."""
    return Turned.apply(x_BTHD, cos_TD, sin_TD, _turned)


def _turned(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor, inverse: bool) -> Tensor:
    """Sequence by sequence: slopes come as attention leaves them, and its heads may lie before the tokens."""
    x_BTHD = dense_rows(x_BTHD)
    out_BTHD = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    for out_THD, x_THD in zip(out_BTHD, x_BTHD, strict=True):
        rotate_into(out_THD, x_THD, cos_TD, sin_TD, inverse)
    return out_BTHD
