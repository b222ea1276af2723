"""Cross-entropy of each row of logits, and its gradient written over them: logits are the largest tensor of a step.

    cross_entropy_grad_(logits_NV, labels_N, scale, losses_N)

Computed in fp32; the gradient is rounded once, to the dtype of the logits. Rows with a label below 0 are ignored.
Shapes: N rows, of any stride, and V vocabulary.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def cross_entropy_grad_(logits_NV: Tensor, labels_N: Tensor, scale: float | Tensor, losses_N: Tensor) -> None:
    """Write -log softmax(logits)[label] to losses, and (softmax - onehot) * scale over logits.

    A scale on the device is not synchronized with the host.
    """
    mask_N = labels_N >= 0
    labels_N1 = labels_N.clamp(min=0).long()[:, None]
    log_probs = torch.log_softmax(at_least_fp32(logits_NV), dim=-1)
    losses_N.copy_(torch.where(mask_N, -log_probs.gather(1, labels_N1)[:, 0], 0.0))
    ones = torch.ones_like(labels_N1, dtype=log_probs.dtype)
    grad = log_probs.exp_().scatter_add_(1, labels_N1, -ones) * scale
    logits_NV.copy_(torch.where(mask_N[:, None], grad, 0.0))
