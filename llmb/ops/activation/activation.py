"""Activation of an MLP, gated or not: activation(x), or activation(x) * up.

    act = activation_forward(x, "squared_relu", None)
    dx, dup = activation_backward(dact, gate, "silu", up)

Computed in fp32 and rounded once. `activation_autograd.fused_activation` is the autograd function.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0) squared."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),  # as the published Grok-1 computes it
    "squared_relu": squared_relu,
}


@op
def activation_forward(x: Tensor, activation: str, up: Tensor | None) -> Tensor:
    """Return activation(x), times `up` if given, in the dtype of x."""
    act = ACTIVATIONS[activation](at_least_fp32(x))
    return (act if up is None else act * at_least_fp32(up)).to(x.dtype)


@op
def activation_backward(dact: Tensor, x: Tensor, activation: str, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of `up`."""
    with torch.enable_grad():
        leaf = at_least_fp32(x.detach()).requires_grad_()
        act = ACTIVATIONS[activation](leaf)
    dact32 = at_least_fp32(dact)
    (dx,) = torch.autograd.grad(act, leaf, dact32 if up is None else dact32 * at_least_fp32(up))
    return dx.to(x.dtype), None if up is None else (dact32 * act.detach()).to(up.dtype)
