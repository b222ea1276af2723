"""Activation of an MLP as one autograd function: one kernel forward, one backward, gated or not.

    act = fused_activation(x, "squared_relu")
    act = fused_activation(gate, "silu", up)      # silu(gate) * up

Saves only its inputs. `activation.py` computes it.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.activation.activation import activation_backward, activation_forward


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.activation = activation
        return activation_forward(x, activation, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dact: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, up = ctx.saved_tensors
        dx, dup = activation_backward(dact, x, ctx.activation, up)
        return dx, None, dup


def fused_activation(x: Tensor, activation: str, up: Tensor | None = None) -> Tensor:
    """Return activation(x), times `up` if given, in the dtype of x."""
    return _Activation.apply(x, activation, up)
