"""The norm after a Mamba scan: the output is gated, then each group of channels is scaled to unit root mean square.

`gated_norm` takes the Triton kernels (`gated_norm_triton.py`) on a GPU and plain torch elsewhere. Both compute in fp32
or wider. Tensor names end in their shape: B sequences, T tokens, G groups, C channels, of a group after G and of all
otherwise.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def gated_norm(y_BTC: Tensor, gate_BTGC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """weight * rms_norm(y * silu(gate)) within each of the groups that the gate has, in the format of y."""
    if takes_triton(y_BTC):
        from llmb.ops.norm.gated_norm_triton import gated_norm_triton

        return gated_norm_triton(y_BTC, gate_BTGC, weight_C, eps)
    return gated_norm_reference(y_BTC, gate_BTGC, weight_C, eps)


def gated_norm_reference(y_BTC: Tensor, gate_BTGC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """The same in plain torch."""
    wide = torch.promote_types(y_BTC.dtype, torch.float32)
    gated_BTGC = y_BTC.to(wide).unflatten(-1, gate_BTGC.shape[2:]) * F.silu(gate_BTGC.to(wide))
    normed_BTC = F.rms_norm(gated_BTGC, gated_BTGC.shape[-1:], eps=eps).flatten(2)
    return (normed_BTC * weight_C).to(y_BTC.dtype)
