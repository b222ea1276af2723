"""Gated RMSNorm after a Mamba scan: the output is gated, then each group of channels is normalized.

Computed in fp32 or wider. Shapes: B sequences, T tokens, G groups, C channels, of a group after G and of all otherwise.
"""

import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def gated_norm(y_BTC: Tensor, gate_BTGC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Return weight * rms_norm(y * silu(gate)) within each group of the gate, in the dtype of y."""
    gated_BTGC = at_least_fp32(y_BTC).unflatten(-1, gate_BTGC.shape[2:]) * F.silu(at_least_fp32(gate_BTGC))
    normed_BTC = F.rms_norm(gated_BTGC, gated_BTGC.shape[-1:], eps=eps).flatten(2)
    return (normed_BTC * weight_C).to(y_BTC.dtype)
