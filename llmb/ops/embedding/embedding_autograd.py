"""Embedding as an autograd function whose weight gradient may have a wider dtype than the weight.

    x_BTC = fused_embedding(tokens_BT, weight_VC)
    x_BTC = fused_embedding(tokens_BT, weight_RC, first)     # rows of a shard: other tokens give zeros

The gradients of a token are summed in fp32 and rounded once (`embedding.py`). If the weight has a gradient already, of
a tied head or of the previous micro-batch, rows are added to it in place; torch's own backward allocates zeros of the
weight's size each time and adds all of them. Shapes: B sequences, T tokens, C channels, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.embedding.embedding import embedding_backward_, embedding_gather_, sort_tokens
from llmb.ops.gemm.weight_gradient import gradient_buffer, gradient_dtype


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight_VC: Tensor, first: int | None) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.weight, ctx.first = weight_VC, first or 0  # the leaf itself, with its gradient
        allocate = weight_VC.new_empty if first is None else weight_VC.new_zeros
        x_BTC = allocate(*tokens_BT.shape, weight_VC.shape[1])
        embedding_gather_(tokens_BT.flatten(), weight_VC, ctx.first, x_BTC.flatten(0, -2))
        return x_BTC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx_BTC: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens_BT,), weight_VC = ctx.saved_tensors, ctx.weight
        tokens, dx_NC = sort_tokens(tokens_BT.flatten()), dx_BTC.flatten(0, -2).contiguous()
        out_VC, accumulate = gradient_buffer(weight_VC)
        dweight_VC = torch.empty_like(weight_VC, dtype=gradient_dtype(weight_VC)) if out_VC is None else out_VC
        embedding_backward_(dx_NC, tokens, dweight_VC, ctx.first, accumulate)
        return None, dweight_VC if out_VC is None else None, None


def fused_embedding(tokens_BT: Tensor, weight_VC: Tensor, first: int | None = None) -> Tensor:
    """Return the row of each token; a shard of the vocabulary has the rows from `first` on."""
    return _Embedding.apply(tokens_BT, weight_VC, first)
