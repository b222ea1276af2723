"""Activation of an MLP, gated or not: activation(gate), or activation(gate) * up.

    act = activation_forward(x, "squared_relu", None)
    dgate, dup = activation_backward(dact, gate, "silu", up)

    act_NF = glu(h_N2F, "silu")                                         # gate and up side by side in one row: SwiGLU
    glu_backward(dact_NF, h_N2F, "silu")                                # h is now dgate | dup, dact the activation
    act = gated_activation(gate_up_N2F, "silu", "per_token")            # in serving

`swigluoai` is that of gpt-oss, gated only: gate and up are clamped, and the gate of a sigmoid is multiplied by up + 1.

In training both passes compute in fp32 and round once, and rows may have any stride. The backward of `glu` needs no
memory: gradients overwrite the tensors that they are gradients of, and the activation, unless it was saved, overwrites
its own gradient: the gradient of the next weight needs it. `activation_autograd.py` has the autograd functions.

Shapes: N rows, F channels.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import Activation, QuantFormat, quantize_activation
from llmb.ops.tensor_layout import at_least_fp32


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0) squared."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),  # as the published Grok-1 computes it
    "squared_relu": squared_relu,
}
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of swigluoai: factor in the sigmoid, largest gate and magnitude of up


def activate(gate: Tensor, activation: str, up: Tensor | None) -> Tensor:
    """Return activation(gate), times `up` if given, in plain torch; swigluoai has no meaning without `up`."""
    if activation == "swigluoai":
        assert up is not None, "swigluoai is a gated activation"
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    act = ACTIVATIONS[activation](gate)
    return act if up is None else act * up


@op
def activation_forward(gate: Tensor, activation: str, up: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return activation(gate), times `up` if given: in the dtype of gate, or written to `out`, which may be gate."""
    act = activate(at_least_fp32(gate), activation, None if up is None else at_least_fp32(up))
    return act.to(gate.dtype) if out is None else out.copy_(act)


@op
def activation_backward(
    dact: Tensor,
    gate: Tensor,
    activation: str,
    up: Tensor | None,
    out: tuple[Tensor, Tensor | None] | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of gate and up: newly allocated, or written to `out`, which may be gate and up themselves.

    With `recompute` the activation overwrites `dact`.
    """
    dgate, dup = empty_gradients(gate, up) if out is None else out
    dact32 = at_least_fp32(dact)
    with torch.enable_grad():
        leaves = [at_least_fp32(x.detach()).requires_grad_() for x in (gate, up) if x is not None]
        act = activate(leaves[0], activation, None if up is None else leaves[1])
        # Of a sum: torch would import sympy, for half a second, to compare the shape of another output's gradient.
        gradients = torch.autograd.grad((act * dact32).sum(), leaves)
    for buffer, gradient in zip((dgate, dup), gradients, strict=False):
        assert buffer is not None
        buffer.copy_(gradient)
    if recompute:
        dact.copy_(act.detach())
    return dgate, dup


def empty_gradients(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Allocate the gradients of gate and up."""
    dgate, dup = (None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    assert dgate is not None
    return dgate, dup


def glu(h_N2F: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up, gate first, in the dtype of h, or written to `out`, which may be the gate."""
    gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
    return activation_forward(gate_NF, activation, up_NF, out)


def glu_backward(dact_NF: Tensor, h_N2F: Tensor, activation: str, recompute: bool = True) -> None:
    """Overwrite h with its gradient and, with `recompute`, dact with the activation."""
    gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
    activation_backward(dact_NF, gate_NF, activation, up_NF, (gate_NF, up_NF), recompute)


@op
def gated_activation(gate_up_N2F: Tensor, activation: str, quant_format: QuantFormat) -> Activation:
    """Return activation(gate) * up quantized for the next linear layer; gate comes first in a row."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    if activation == "swigluoai":  # rounded once, by the kernel too
        act_NF = activate(gate_NF.float(), activation, up_NF.float()).to(gate_up_N2F.dtype)
    else:
        act_NF = activate(gate_NF, activation, up_NF)
    return quantize_activation.reference(act_NF, quant_format)
