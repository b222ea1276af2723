"""The norm after a Mamba scan: the output is gated, then each group of channels is scaled to unit root mean square.

`gated_norm` takes the Triton kernels (`gated_norm_triton.py`) on a GPU and plain torch elsewhere. Both compute in fp32
or wider. Tensor names end in their shape: B sequences, T tokens, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.kernels.triton_device import takes_triton


def gated_norm(y_BTC: Tensor, gate_BTC: Tensor, weight_C: Tensor, groups: int, eps: float) -> Tensor:
    """weight * rms_norm(y * silu(gate)) within each of the groups of channels, in the format of y."""
    if takes_triton(y_BTC):
        from llmb.kernels.gated_norm_triton import gated_norm_triton

        return gated_norm_triton(y_BTC, gate_BTC, weight_C, groups, eps)
    return gated_norm_reference(y_BTC, gate_BTC, weight_C, groups, eps)


def gated_norm_reference(y_BTC: Tensor, gate_BTC: Tensor, weight_C: Tensor, groups: int, eps: float) -> Tensor:
    """The same in plain torch."""
    wide = torch.promote_types(y_BTC.dtype, torch.float32)
    gated = (y_BTC.to(wide) * F.silu(gate_BTC.to(wide))).unflatten(-1, (groups, -1))
    normed = F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight_C).to(y_BTC.dtype)
