"""The embedding as a step of autograd: rows of a matrix there, and back into a gradient that may be wider than it.

    x_BTC = embedded(tokens_BT, weight_VC)

A word's slopes are summed in fp32 and rounded once (`embedding.py`). Where the matrix has a gradient already, as of the
head where both are one, or of the micro-batch before, rows are added to it there and then; torch's own way back makes
a matrix of zeros each time and adds all of it. Shapes: B sequences, T tokens, C channels, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.embedding.embedding import add_rows_, gather_rows_, in_order
from llmb.ops.gemm.weight_gradient import gradient_dtype, growing_gradient


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight_VC: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.weight = weight_VC  # itself, with the gradient it has
        x_BTC = weight_VC.new_empty(*tokens_BT.shape, weight_VC.shape[1])
        gather_rows_(tokens_BT.flatten(), weight_VC, 0, x_BTC.flatten(0, -2))
        return x_BTC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx_BTC: Tensor) -> tuple[None, Tensor | None]:
        (tokens_BT,), weight_VC = ctx.saved_tensors, ctx.weight
        tokens, dx_NC = in_order(tokens_BT.flatten()), dx_BTC.flatten(0, -2).contiguous()
        if (total_VC := growing_gradient(weight_VC)) is not None:
            add_rows_(dx_NC, tokens, total_VC, 0, fresh=False)
            return None, None
        dweight_VC = torch.empty_like(weight_VC, dtype=gradient_dtype(weight_VC))
        add_rows_(dx_NC, tokens, dweight_VC, 0, fresh=True)
        return None, dweight_VC


def embedded(tokens_BT: Tensor, weight_VC: Tensor) -> Tensor:
    """Each token's row."""
    return _Embedded.apply(tokens_BT, weight_VC)
