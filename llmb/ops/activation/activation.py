"""Activation of an MLP, gated or not: activation(gate), or activation(gate) * up.

    act = activation_forward(x, "squared_relu", None)
    dgate, dup = activation_backward(dact, gate, "silu", up)

    act_NF = swiglu(h_N2F)                                              # silu of gate and up side by side in one row
    swiglu_backward(dact_NF, h_N2F)                                     # h is now dgate | dup, dact the activation
    act = gated_activation(gate_up_N2F, "silu", "per_token")            # in serving

In training both passes compute in fp32 and round once, and rows may have any stride. The backward of SwiGLU needs no
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


@op
def activation_forward(gate: Tensor, activation: str, up: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return activation(gate), times `up` if given: in the dtype of gate, or written to `out`, which may be gate."""
    act = ACTIVATIONS[activation](at_least_fp32(gate))
    act = act if up is None else act * at_least_fp32(up)
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
    up32 = torch.ones_like(dact32) if up is None else at_least_fp32(up)
    with torch.enable_grad():
        leaf = at_least_fp32(gate.detach()).requires_grad_()
        ungated = ACTIVATIONS[activation](leaf)
        # Of a sum: torch would import sympy, for half a second, to compare the shape of another output's gradient.
        (dgate32,) = torch.autograd.grad((ungated * (dact32 * up32)).sum(), leaf)
    act = ungated.detach()
    dup32, act = dact32 * act, act * up32
    dgate.copy_(dgate32)
    if dup is not None:
        dup.copy_(dup32)
    if recompute:
        dact.copy_(act)
    return dgate, dup


def empty_gradients(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Allocate the gradients of gate and up."""
    dgate, dup = (None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    assert dgate is not None
    return dgate, dup


def swiglu(h_N2F: Tensor, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, gate first, in the dtype of h, or written to `out`, which may be the gate."""
    gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
    return activation_forward(gate_NF, "silu", up_NF, out)


def swiglu_backward(dact_NF: Tensor, h_N2F: Tensor, recompute: bool = True) -> None:
    """Overwrite h with its gradient and, with `recompute`, dact with the activation."""
    gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
    activation_backward(dact_NF, gate_NF, "silu", up_NF, (gate_NF, up_NF), recompute)


@op
def gated_activation(gate_up_N2F: Tensor, activation: str, quant_format: QuantFormat) -> Activation:
    """Return activation(gate) * up quantized for the next linear layer; "silu" or "gelu", gate first in a row."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    return quantize_activation.reference(ACTIVATIONS[activation](gate_NF) * up_NF, quant_format)
