"""Next-token cross entropy in chunks of tokens, without materializing all logits.

With a vocabulary of 128 thousand, the logits of 8,192 tokens take 4 GiB in fp32 and their gradient as much again. Here
the loss and both gradients of a chunk of tokens are computed at once and its logits freed. Nothing is recomputed in the
backward pass, which only scales the gradients.

With the whole vocabulary the gradient overwrites the logits, in their dtype and in one pass
(`llmb/ops/loss/cross_entropy.py`). With a vocabulary-parallel head the logsumexp is combined over ranks in between.

Shapes: N tokens of all sequences, C hidden width, V vocabulary, or the local part of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmb.ops.gemm.matmul import matmul
from llmb.ops.gemm.weight_gradient import accumulated_grad, gradient_dtype
from llmb.ops.loss.cross_entropy import cross_entropy_grad_
from llmb.ops.loss.scaled_add import scaled_add_

# 2 GiB of bf16 logits at a vocabulary of 128 thousand. Each chunk reads and writes the head's gradient, which in fp32
# takes a tenth of the time of the GEMMs of 2,048 tokens on an H200.
CHUNK_TOKENS = 8192
VOCAB_PARALLEL_CHUNK_TOKENS = 2048  # fp32 logits and their exponentials
# Maps the local logsumexp of each token and the logit of its label, or 0 where that is not local, both [N, 1], to those
# of the whole vocabulary.
CombineLse = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        chunk: int,
        vocab_start: int,
        combine_lse: CombineLse | None,
        accum_dtype: torch.dtype,
    ) -> Tensor:
        tokens = hidden_NC.shape[0]
        head_VC = weight_VC.to(hidden_NC.dtype)
        losses_N = torch.empty(tokens, dtype=torch.float32, device=hidden_NC.device)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_NC = torch.empty_like(hidden_NC) if needs_hidden else None
        grad_weight_VC: Tensor | None = None
        for start in range(0, tokens, chunk):
            rows = slice(start, start + chunk)
            if combine_lse is None:
                grad_NV = matmul(hidden_NC[rows], head_VC.T)  # logits, until the next line
                cross_entropy_grad_(grad_NV, labels_N[rows], 1 / tokens, losses_N[rows])
            else:
                grad_NV = _vocab_parallel_grad(  # frees the logits, which have no other reference
                    matmul(hidden_NC[rows], head_VC.T),
                    labels_N[rows],
                    vocab_start,
                    combine_lse,
                    1 / tokens,
                    losses_N[rows],
                )
            if grad_hidden_NC is not None:
                matmul(grad_NV, head_VC, out=grad_hidden_NC[rows])
            if needs_weight and grad_weight_VC is None:
                grad_weight_VC = matmul(grad_NV.T, hidden_NC[rows], dtype=accum_dtype)
            elif grad_weight_VC is not None:
                matmul(grad_NV.T, hidden_NC[rows], out=grad_weight_VC, addend=grad_weight_VC)
            del grad_NV  # before the next logits are allocated
        ctx.save_for_backward(grad_hidden_NC, grad_weight_VC)
        ctx.weight = weight_VC  # the parameter with its .grad
        return losses_N.sum() / tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_NC, grad_weight_VC = ctx.saved_tensors
        # In place: a copy of the head's gradient would be the largest tensor of the whole backward pass.
        if grad_hidden_NC is not None:
            scaled_add_(grad_hidden_NC, grad_hidden_NC, grad_loss, accumulate=False)
        if grad_weight_VC is not None:
            if (total_VC := accumulated_grad(ctx.weight)) is not None:
                scaled_add_(total_VC, grad_weight_VC, grad_loss, accumulate=True)
                grad_weight_VC = None
            else:
                unscaled_VC, dtype = grad_weight_VC, gradient_dtype(ctx.weight)
                if dtype != unscaled_VC.dtype:
                    grad_weight_VC = torch.empty_like(unscaled_VC, dtype=dtype)
                scaled_add_(grad_weight_VC, unscaled_VC, grad_loss, accumulate=False)
        return grad_hidden_NC, grad_weight_VC, None, None, None, None, None


def _vocab_parallel_grad(
    logits_NV: Tensor, labels_N: Tensor, vocab_start: int, combine_lse: CombineLse, scale: float, losses_N: Tensor
) -> Tensor:
    """Write each token's loss and return (softmax - one-hot) * scale of the local logits, in their dtype."""
    dtype, logits_NV = logits_NV.dtype, logits_NV.float()
    target_N1, is_local_N1 = _label_rows(labels_N[:, None], vocab_start, logits_NV.shape[1])
    lse_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    lse_N1, label_logit_N1 = combine_lse(lse_N1, logits_NV.gather(1, target_N1) * is_local_N1)
    losses_N.copy_((lse_N1 - label_logit_N1)[:, 0])
    grad_NV = logits_NV.sub_(lse_N1).exp_()
    return grad_NV.scatter_add_(1, target_N1, -is_local_N1).mul_(scale).to(dtype)


def _label_rows(labels_N1: Tensor, vocab_start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the local row of each label and 1.0, or any row and 0.0 for a label that is not local."""
    rows_N1 = labels_N1 - vocab_start
    is_local_N1 = (rows_N1 >= 0) & (rows_N1 < rows)
    return rows_N1.clamp(0, rows - 1), is_local_N1.float()


def chunked_cross_entropy(
    hidden: Tensor,
    weight_VC: Tensor,
    labels: Tensor,
    chunk: int = CHUNK_TOKENS,
    vocab_start: int = 0,
    combine_lse: CombineLse | None = None,
    accum_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the mean of -log softmax(hidden @ weight.T)[label], an fp32 scalar; hidden is [..., C], labels [...].

    A vocabulary-parallel head has the rows from `vocab_start` on and needs `combine_lse`; the gradient of hidden is
    then the contribution of these rows. The gradient of the weight is accumulated over chunks in `accum_dtype`.
    """
    return _ChunkedCrossEntropy.apply(
        hidden.flatten(0, -2), weight_VC, labels.flatten(), chunk, vocab_start, combine_lse, accum_dtype
    )
