"""Embedding as an autograd function whose weight gradient may have a wider dtype than the weight.

    x_BTC = embedded(tokens_BT, weight_VC)

The gradients of a token are summed in fp32 and rounded once (`embedding.py`). If the weight has a gradient already, of
a tied head or of the previous micro-batch, rows are added to it in place; torch's own backward allocates zeros of the
weight's size each time and adds all of them. Shapes: B sequences, T tokens, C channels, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.embedding.embedding import embedding_backward_, embedding_gather_, sort_tokens
from llmb.ops.gemm.weight_gradient import accumulated_grad, gradient_dtype


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight_VC: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.weight = weight_VC  # the leaf itself, with its gradient
        x_BTC = weight_VC.new_empty(*tokens_BT.shape, weight_VC.shape[1])
        embedding_gather_(tokens_BT.flatten(), weight_VC, 0, x_BTC.flatten(0, -2))
        return x_BTC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx_BTC: Tensor) -> tuple[None, Tensor | None]:
        (tokens_BT,), weight_VC = ctx.saved_tensors, ctx.weight
        tokens, dx_NC = sort_tokens(tokens_BT.flatten()), dx_BTC.flatten(0, -2).contiguous()
        if (total_VC := accumulated_grad(weight_VC)) is not None:
            embedding_backward_(dx_NC, tokens, total_VC, 0, accumulate=True)
            return None, None
        dweight_VC = torch.empty_like(weight_VC, dtype=gradient_dtype(weight_VC))
        embedding_backward_(dx_NC, tokens, dweight_VC, 0, accumulate=False)
        return None, dweight_VC


def fused_embedding(tokens_BT: Tensor, weight_VC: Tensor) -> Tensor:
    """Return the row of each token."""
    return _Embedding.apply(tokens_BT, weight_VC)
