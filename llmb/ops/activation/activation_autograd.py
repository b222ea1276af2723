"""The activation of an MLP as a step of autograd, one pass there and one back, gated or not.

    act = activated(x, "squared_relu")
    act = activated(gate, "silu", up)      # silu(gate) * up

Keeps what it was given and nothing that it makes on its way. Computed in fp32 and rounded once; the Triton kernels
(`activation_triton.py`) on a GPU, plain torch elsewhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) squared."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),  # what the published Grok-1 computes
    "squared_relu": squared_relu,
}


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.activation = activation
        return _forward(x, activation, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dact: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, up = ctx.saved_tensors
        dx, dup = _backward(dact, x, ctx.activation, up)
        return dx, None, dup


def activated(x: Tensor, activation: str, up: Tensor | None = None) -> Tensor:
    """activation(x), times `up` where there is one; in the format of x."""
    return _Activated.apply(x, activation, up)


def _forward(x: Tensor, activation: str, up: Tensor | None) -> Tensor:
    if takes_triton(x):
        from llmb.ops.activation.activation_triton import activated_triton

        return activated_triton(x, activation, up)
    return activated_reference(x, activation, up)


def _backward(dact: Tensor, x: Tensor, activation: str, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if takes_triton(x):
        from llmb.ops.activation.activation_triton import activated_backward_triton

        return activated_backward_triton(dact, x, activation, up)
    return activated_backward_reference(dact, x, activation, up)


def activated_reference(x: Tensor, activation: str, up: Tensor | None) -> Tensor:
    """In plain torch."""
    act = ACTIVATIONS[activation](_wide(x))
    return (act if up is None else act * _wide(up)).to(x.dtype)


def activated_backward_reference(
    dact: Tensor, x: Tensor, activation: str, up: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The slopes of x and of `up`, by the plain form's own way back."""
    with torch.enable_grad():
        watched = _wide(x.detach()).requires_grad_()
        act = ACTIVATIONS[activation](watched)
    (dx,) = torch.autograd.grad(act, watched, _wide(dact) if up is None else _wide(dact) * _wide(up))
    return dx.to(x.dtype), None if up is None else (_wide(dact) * act.detach()).to(up.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
