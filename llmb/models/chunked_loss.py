"""Next-token cross entropy in chunks, so that the whole logits never exist.

With a vocabulary of 128 thousand, the logits of 8,192 tokens take 4 GiB in fp32 and their gradient as much again. Here
a chunk of tokens is taken through the head, its loss and both gradients are computed at once, and its logits are
dropped. Nothing is recomputed in the backward pass, which only scales the gradients that are already there.

Where the head has the whole vocabulary the slopes are written over the logits, in the format of the stream and in one
pass (`llmb/ops/loss/cross_entropy.py`). Where others have the rest of it, what their rows give is asked for in between.

Shapes: N tokens of all sequences, C hidden width, V vocabulary, or those of its entries whose rows the head has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmb.ops.gemm.matmul import multiply
from llmb.ops.gemm.weight_gradient import gradient_dtype, growing_gradient
from llmb.ops.loss.cross_entropy import cross_entropy_slope_
from llmb.ops.loss.scaled_add import scaled_add_

# 2 GiB of bf16 logits at a vocabulary of 128 thousand. Each chunk reads and writes the head's gradient, which in fp32
# takes a tenth of the time of 2,048 tokens' products on an H200.
CHUNK_TOKENS = 8192
AGREED_TOKENS = 2048  # where others have a part of the vocabulary: logits in fp32, their exponentials beside them
# From the log of the sum of the exponentials of a token's logits here, and the logit of its label or 0 where that is
# not here, both [N, 1]: the same two for the whole vocabulary.
Agreement = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        chunk: int,
        first: int,
        agree: Agreement | None,
        sums: torch.dtype,
    ) -> Tensor:
        tokens = hidden_NC.shape[0]
        head_VC = weight_VC.to(hidden_NC.dtype)
        losses_N = torch.empty(tokens, dtype=torch.float32, device=hidden_NC.device)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_NC = torch.empty_like(hidden_NC) if wants_hidden else None
        grad_weight_VC: Tensor | None = None
        for start in range(0, tokens, chunk):
            some = slice(start, start + chunk)
            if agree is None:
                slope_NV = multiply(hidden_NC[some], head_VC.T)  # logits, until the next line
                cross_entropy_slope_(slope_NV, labels_N[some], 1 / tokens, losses_N[some])
            else:
                slope_NV = _agreed_slope(  # which lets go of the logits: nobody else has them
                    multiply(hidden_NC[some], head_VC.T), labels_N[some], first, agree, 1 / tokens, losses_N[some]
                )
            if grad_hidden_NC is not None:
                multiply(slope_NV, head_VC, out=grad_hidden_NC[some])
            if wants_weight and grad_weight_VC is None:
                grad_weight_VC = multiply(slope_NV.T, hidden_NC[some], dtype=sums)
            elif grad_weight_VC is not None:
                multiply(slope_NV.T, hidden_NC[some], out=grad_weight_VC, onto=grad_weight_VC)
            del slope_NV  # before the next logits are made
        ctx.save_for_backward(grad_hidden_NC, grad_weight_VC)
        ctx.weight = weight_VC  # itself, with the gradient it has
        return losses_N.sum() / tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_NC, grad_weight_VC = ctx.saved_tensors
        # In place: a copy of the head's gradient would be the largest tensor of the whole backward pass.
        if grad_hidden_NC is not None:
            scaled_add_(grad_hidden_NC, grad_hidden_NC, grad_loss, fresh=True)
        if grad_weight_VC is not None:
            if (total_VC := growing_gradient(ctx.weight)) is not None:
                scaled_add_(total_VC, grad_weight_VC, grad_loss, fresh=False)
                grad_weight_VC = None
            else:
                found_VC, dtype = grad_weight_VC, gradient_dtype(ctx.weight)
                if dtype != found_VC.dtype:
                    grad_weight_VC = torch.empty_like(found_VC, dtype=dtype)
                scaled_add_(grad_weight_VC, found_VC, grad_loss, fresh=True)
        return grad_hidden_NC, grad_weight_VC, None, None, None, None, None


def _agreed_slope(
    logits_NV: Tensor, labels_N: Tensor, first: int, agree: Agreement, scale: float, losses_N: Tensor
) -> Tensor:
    """Each token's loss, and (softmax - one-hot) * scale of the logits that are here; in the format of the logits."""
    dtype, logits_NV = logits_NV.dtype, logits_NV.float()
    target_N1, here_N1 = _places(labels_N[:, None], first, logits_NV.shape[1])
    log_total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    log_total_N1, wanted_N1 = agree(log_total_N1, logits_NV.gather(1, target_N1) * here_N1)
    losses_N.copy_((log_total_N1 - wanted_N1)[:, 0])
    slope_NV = logits_NV.sub_(log_total_N1).exp_()
    return slope_NV.scatter_add_(1, target_N1, -here_N1).mul_(scale).to(dtype)


def _places(labels_N1: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """The head's row for each label and 1.0, or any row and 0.0 for a label whose row is elsewhere."""
    places_N1 = labels_N1 - first
    here_N1 = (places_N1 >= 0) & (places_N1 < rows)
    return places_N1.clamp(0, rows - 1), here_N1.float()


def chunked_cross_entropy(
    hidden: Tensor,
    weight_VC: Tensor,
    labels: Tensor,
    chunk: int = CHUNK_TOKENS,
    first: int = 0,
    agree: Agreement | None = None,
    sums: torch.dtype = torch.float32,
) -> Tensor:
    """Mean of -log softmax(hidden @ weight.T)[label] over tokens, a scalar in fp32; hidden is [..., C], labels [...].

    A head may have the vocabulary's rows from `first` on only, where `agree` finds out about the others. The gradient
    of hidden is then what these rows add to it. That of the weight adds up from chunk to chunk in the format of `sums`.
    """
    return _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight_VC, labels.flatten(), chunk, first, agree, sums)
