"""SwiGLU, silu(gate) * up, forward and backward, of gate and up side by side in one row.

    act_NF = swiglu(h_N2F)
    swiglu_backward(dact_NF, h_N2F)  # h_N2F is now dgate | dup, dact_NF the recomputed activation

The backward needs no memory: gradients overwrite the tensors that they are gradients of, and the activation, unless it
was saved, overwrites its own gradient: the gradient of the next weight needs it. Shapes: N rows, of any stride, and F
channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def swiglu(h_N2F: Tensor, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, gate first, computed in fp32; in the dtype of h, or written to `out`."""
    gate, up = at_least_fp32(h_N2F).chunk(2, dim=-1)
    return empty_act(h_N2F, out).copy_(F.silu(gate) * up)


@op
def swiglu_backward(dact_NF: Tensor, h_N2F: Tensor, recompute: bool = True) -> None:
    """Overwrite h with its gradient and, with `recompute`, dact with the activation."""
    dact = at_least_fp32(dact_NF)
    gate, up = at_least_fp32(h_N2F).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    act = silu * up
    dgate = dact * up * sigmoid * (1 + gate * (1 - sigmoid))
    h_N2F.copy_(torch.cat((dgate, dact * silu), dim=-1))
    if recompute:
        dact_NF.copy_(act)


def empty_act(h_N2F: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `out`, or an uninitialized tensor for the activation."""
    return h_N2F.new_empty(len(h_N2F), h_N2F.shape[1] // 2) if out is None else out
