"""Llama's gated activation, silu(gate) * up, there and back, of gate and up side by side in one row.

    act_NF = swiglu(h_N2F)
    swiglu_backward(dact_NF, h_N2F)  # h_N2F is now dgate | dup, dact_NF is the activation again

The way back needs no memory: slopes are written over what they are the slopes of, and the activation, unless somebody
kept it, over its own slope: the next matrix's weights want it. Shapes: N rows, of any stride, and F channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def swiglu(h_N2F: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, gate first, computed in fp32; in the format of h, or written to `out`."""
    n, both = h_N2F.shape
    out_NF = torch.empty(n, both // 2, dtype=h_N2F.dtype, device=h_N2F.device) if out is None else out
    if takes_triton(h_N2F):
        from llmb.ops.activation.swiglu_triton import swiglu_triton

        swiglu_triton(h_N2F, out_NF)
    else:
        swiglu_reference(h_N2F, out_NF)
    return out_NF


def swiglu_reference(h_N2F: Tensor, out_NF: Tensor) -> None:
    """The same in plain torch."""
    gate, up = _wide(h_N2F).chunk(2, dim=-1)
    out_NF.copy_(F.silu(gate) * up)


def swiglu_backward(dact_NF: Tensor, h_N2F: Tensor, again: bool = True) -> None:
    """In place: h becomes its slope and, if it is wanted again, dact the activation."""
    if takes_triton(h_N2F):
        from llmb.ops.activation.swiglu_triton import swiglu_backward_triton

        swiglu_backward_triton(dact_NF, h_N2F, again)
    else:
        swiglu_backward_reference(dact_NF, h_N2F, again)


def swiglu_backward_reference(dact_NF: Tensor, h_N2F: Tensor, again: bool = True) -> None:
    """The same in plain torch."""
    dact = _wide(dact_NF)
    gate, up = _wide(h_N2F).chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    opened = gate * share
    act = opened * up
    dgate = dact * up * share * (1 + gate * (1 - share))
    h_N2F.copy_(torch.cat((dgate, dact * opened), dim=-1))
    if again:
        dact_NF.copy_(act)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
