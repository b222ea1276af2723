"""Next-token cross entropy in chunks of tokens, without materializing all logits.

With a vocabulary of 128 thousand, the logits of 8,192 tokens take 4 GiB in fp32 and their gradient as much again. Here
the loss and both gradients of a chunk of tokens are computed at once and its logits freed. Nothing is recomputed in the
backward pass, which only scales the gradients.

The gradient overwrites the logits, in their dtype (`llmb/ops/loss/cross_entropy.py`). With a vocabulary-parallel head
the logsumexp is combined over ranks first.

Shapes: N tokens of all sequences, C hidden width, V vocabulary, or the local part of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmb.ops.gemm.matmul import matmul
from llmb.ops.gemm.weight_gradient import gradient_buffer, gradient_dtype
from llmb.ops.loss.cross_entropy import cross_entropy_grad_, vocab_parallel_grad_, vocab_parallel_logsumexp
from llmb.ops.loss.scaled_add import scaled_add_

# 2 GiB of bf16 logits at a vocabulary of 128 thousand. Each chunk reads and writes the head's gradient, which in fp32
# takes a tenth of the time of the GEMMs of 2,048 tokens on an H200.
CHUNK_TOKENS = 8192
# Maps the local logsumexp of each token and the logit of its label, or 0 where that is not local, stacked to [2, N], to
# those of the whole vocabulary.
CombineLse = Callable[[Tensor], tuple[Tensor, Tensor]]


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
        softcap: float | None,
    ) -> Tensor:
        tokens = hidden_NC.shape[0]
        head_VC = weight_VC.to(hidden_NC.dtype)
        losses_N = torch.empty(tokens, dtype=torch.float32, device=hidden_NC.device)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_NC = torch.empty_like(hidden_NC) if needs_hidden else None
        grad_weight_VC: Tensor | None = None
        for start in range(0, tokens, chunk):
            rows = slice(start, start + chunk)
            grad_NV = matmul(hidden_NC[rows], head_VC.T)  # logits, until the loss is computed
            if combine_lse is None:
                cross_entropy_grad_(grad_NV, labels_N[rows], 1 / tokens, losses_N[rows], softcap)
            else:
                derivative_NV = None if softcap is None else _softcap_(grad_NV, softcap)
                _vocab_parallel_loss(grad_NV, labels_N[rows], vocab_start, combine_lse, 1 / tokens, losses_N[rows])
                if derivative_NV is not None:
                    grad_NV.mul_(derivative_NV)
                del derivative_NV
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
            unscaled_VC, dtype = grad_weight_VC, gradient_dtype(ctx.weight)
            out_VC, accumulate = gradient_buffer(ctx.weight)
            if out_VC is not None:
                grad_weight_VC = None
            elif dtype == unscaled_VC.dtype:
                out_VC = unscaled_VC
            else:
                out_VC = grad_weight_VC = torch.empty_like(unscaled_VC, dtype=dtype)
            scaled_add_(out_VC, unscaled_VC, grad_loss, accumulate=accumulate)
        return grad_hidden_NC, grad_weight_VC, None, None, None, None, None, None


def _softcap_(logits_NV: Tensor, softcap: float) -> Tensor:
    """Set the logits to softcap * tanh(logits / softcap), and return the derivative of that."""
    tanh_NV = logits_NV.div_(softcap).tanh_()
    derivative_NV = tanh_NV.square().neg_().add_(1)
    logits_NV.mul_(softcap)
    return derivative_NV


def _vocab_parallel_loss(
    logits_NV: Tensor, labels_N: Tensor, vocab_start: int, combine_lse: CombineLse, scale: float, losses_N: Tensor
) -> None:
    """Write each token's loss, and (softmax - one-hot) * scale over the local logits."""
    both_2N = torch.empty(2, len(labels_N), dtype=torch.float32, device=logits_NV.device)
    vocab_parallel_logsumexp(logits_NV, labels_N, vocab_start, both_2N[0], both_2N[1])
    lse_N, label_logits_N = combine_lse(both_2N)
    torch.sub(lse_N, label_logits_N, out=losses_N)
    vocab_parallel_grad_(logits_NV, labels_N, vocab_start, lse_N, scale)


def chunked_cross_entropy(
    hidden: Tensor,
    weight_VC: Tensor,
    labels: Tensor,
    chunk: int = CHUNK_TOKENS,
    vocab_start: int = 0,
    combine_lse: CombineLse | None = None,
    accum_dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
) -> Tensor:
    """Return the mean of -log softmax(hidden @ weight.T)[label], an fp32 scalar; hidden is [..., C], labels [...].

    A vocabulary-parallel head has the rows from `vocab_start` on and needs `combine_lse`; the gradient of hidden is
    then the contribution of these rows. The gradient of the weight is accumulated over chunks in `accum_dtype`. With a
    softcap the logits are softcap * tanh(logits / softcap).
    """
    return _ChunkedCrossEntropy.apply(
        hidden.flatten(0, -2), weight_VC, labels.flatten(), chunk, vocab_start, combine_lse, accum_dtype, softcap
    )
