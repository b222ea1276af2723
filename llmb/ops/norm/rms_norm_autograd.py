"""RMSNorm with the residual as one autograd function, which saves only its input and has a one-pass backward.

    normed, residual = rms_norm_with_residual(x, weight, eps)      # residual is x, to be added behind the block
    total = rms_norm_and_add(x, weight, eps, residual)             # a norm behind the block: residual + norm(x)

The input of a block reaches its output through the norm and through the residual connection, so that two gradients
come back and would be added in a pass of their own. Taken from here, both come back to one kernel (`rms_norm.py`),
which adds them. If only the norm is used, the residual has no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward
from llmb.ops.tensor_layout import as_rows


class _RmsNormWithResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight_C)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return rms_norm(as_rows(x), weight_C, eps).view(x.shape), x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dnormed: Tensor | None, d_residual: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        if dnormed is None:
            return d_residual, None, None
        x, weight_C = ctx.saved_tensors
        dx, dweight_C = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight_C)
        d_residual_NC = None if d_residual is None else as_rows(d_residual)
        rms_norm_backward(
            as_rows(dnormed), as_rows(x), weight_C, ctx.eps, d_residual_NC, as_rows(dx), dweight_C, accumulate=False
        )
        return dx, dweight_C, None


class _RmsNormAndAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, eps: float, residual: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_C)
        ctx.eps = eps
        return rms_norm(as_rows(x), weight_C, eps, addend_NC=as_rows(residual)).view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        x, weight_C = ctx.saved_tensors
        dx, dweight_C = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight_C)
        rms_norm_backward(
            as_rows(d_total), as_rows(x), weight_C, ctx.eps, None, as_rows(dx), dweight_C, accumulate=False
        )
        return dx, dweight_C, None, d_total


def rms_norm_and_add(x: Tensor, weight_C: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Return residual + weight * x / rms(x) over the last dimension, in the dtype of x."""
    return _RmsNormAndAdd.apply(x, weight_C, eps, residual)


def rms_norm_with_residual(x: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return weight * x / rms(x) over the last dimension, in the dtype of x, and x."""
    return _RmsNormWithResidual.apply(x, weight_C, eps)
