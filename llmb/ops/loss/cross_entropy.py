"""Cross-entropy of each row of logits, and its gradient written over them: logits are the largest tensor of a step.

    cross_entropy_grad_(logits_NV, labels_N, scale, losses_N, softcap)

Where a rank has the logits of the range of the vocabulary that begins at `first`, ranks combine the two numbers per row
that the first call writes, before the second:

    vocab_parallel_logsumexp(logits_NV, labels_N, first, lse_N, label_logits_N)
    vocab_parallel_grad_(logits_NV, labels_N, first, lse_N, scale)

Computed in fp32; the gradient is rounded once, to the dtype of the logits. Rows with a label below 0 are ignored by
`cross_entropy_grad_`. Shapes: N rows, of any stride, and V vocabulary, or the local part of it.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def cross_entropy_grad_(
    logits_NV: Tensor, labels_N: Tensor, scale: float | Tensor, losses_N: Tensor, softcap: float | None = None
) -> None:
    """Write -log softmax(logits)[label] to losses, and (softmax - onehot) * scale over logits.

    With a softcap the softmax is that of softcap * tanh(logits / softcap), and the gradient that of the logits. A scale
    on the device is not synchronized with the host.
    """
    mask_N = labels_N >= 0
    labels_N1 = labels_N.clamp(min=0).long()[:, None]
    exact_NV, derivative_NV = at_least_fp32(logits_NV), None
    if softcap is not None:
        tanh_NV = torch.tanh(exact_NV / softcap)
        exact_NV, derivative_NV = softcap * tanh_NV, 1 - tanh_NV.square()
    log_probs = torch.log_softmax(exact_NV, dim=-1)
    losses_N.copy_(torch.where(mask_N, -log_probs.gather(1, labels_N1)[:, 0], 0.0))
    ones = torch.ones_like(labels_N1, dtype=log_probs.dtype)
    grad = log_probs.exp_().scatter_add_(1, labels_N1, -ones) * scale
    grad = grad if derivative_NV is None else grad * derivative_NV
    logits_NV.copy_(torch.where(mask_N[:, None], grad, 0.0))


@op
def vocab_parallel_logsumexp(
    logits_NV: Tensor, labels_N: Tensor, first: int, lse_N: Tensor, label_logits_N: Tensor
) -> None:
    """Write each row's logsumexp and the logit of its label, or 0 where the label is not in [first, first + V)."""
    v, logits_NV = logits_NV.shape[1], at_least_fp32(logits_NV)
    local_N = labels_N.long() - first
    label_logits = logits_NV.gather(1, local_N.clamp(0, v - 1)[:, None])[:, 0]
    label_logits_N.copy_(torch.where((local_N >= 0) & (local_N < v), label_logits, 0.0))
    lse_N.copy_(logits_NV.logsumexp(dim=-1))


@op
def vocab_parallel_grad_(logits_NV: Tensor, labels_N: Tensor, first: int, lse_N: Tensor, scale: float) -> None:
    """Write (exp(logits - lse) - onehot) * scale over logits, with the logsumexp over the whole vocabulary."""
    probs = (at_least_fp32(logits_NV) - lse_N[:, None]).exp_()
    vocab_V = torch.arange(first, first + logits_NV.shape[1], device=logits_NV.device)
    probs[labels_N[:, None] == vocab_V] -= 1
    logits_NV.copy_(probs.mul_(scale))
