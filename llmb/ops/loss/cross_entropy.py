"""The loss of each row of logits, and its slope written over them: logits are the largest thing a step makes.

    cross_entropy_slope_(logits_NV, labels_N, scale, losses_N)

Computed in fp32; the slope is rounded once, to the format of the logits. A label below 0 says that its row does not
count. Shapes: N rows, of any stride, and V words.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def cross_entropy_slope_(logits_NV: Tensor, labels_N: Tensor, scale: float | Tensor, losses_N: Tensor) -> None:
    """losses = -log softmax(logits)[label]; logits become (softmax - onehot) * scale. A scale on the device stays."""
    if takes_triton(logits_NV):
        from llmb.ops.loss.cross_entropy_triton import cross_entropy_slope_triton_

        cross_entropy_slope_triton_(logits_NV, labels_N, scale, losses_N)
    else:
        cross_entropy_slope_reference_(logits_NV, labels_N, scale, losses_N)


def cross_entropy_slope_reference_(
    logits_NV: Tensor, labels_N: Tensor, scale: float | Tensor, losses_N: Tensor
) -> None:
    """The same in plain torch."""
    counts = labels_N >= 0
    labels_N1 = labels_N.clamp(min=0).long()[:, None]
    logs = torch.log_softmax(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), dim=-1)
    losses_N.copy_(torch.where(counts, -logs.gather(1, labels_N1)[:, 0], 0.0))
    slope = logs.exp_().scatter_add_(1, labels_N1, -torch.ones_like(labels_N1, dtype=logs.dtype)) * scale
    logits_NV.copy_(torch.where(counts[:, None], slope, 0.0))
