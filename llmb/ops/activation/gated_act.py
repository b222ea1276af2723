"""activation(gate) * up of a gated MLP whose two products came out of one, side by side, in the form the next wants."""

import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton
from llmb.ops.quant.activation_quant import Activation, Form, in_form_reference

ACTIVATIONS = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}


def gated_reference(both_N2F: Tensor, activation: str, form: Form) -> Activation:
    """Gate first, up second along the channels."""
    gate_NF, up_NF = both_N2F.chunk(2, dim=-1)
    return in_form_reference(ACTIVATIONS[activation](gate_NF) * up_NF, form)


def gated(both_N2F: Tensor, activation: str, form: Form) -> Activation:
    """The same in one kernel where there is one."""
    if takes_triton(both_N2F):
        from llmb.ops.activation.gated_act_triton import gated_triton

        return gated_triton(both_N2F, activation, form)
    return gated_reference(both_N2F, activation, form)
