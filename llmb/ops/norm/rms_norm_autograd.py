"""RMSNorm as a step of autograd that keeps its input only, and goes back in one pass with the slope around the block.

    normed, stream = norm_beside(x, weight, eps)      # stream is x: what goes around the block and is added behind it

A block's input reaches its output twice, through the norm and around it, so that two slopes come back and would be
added in a pass of their own. Taken from here both come back to one kernel (`rms_norm.py`), which adds them as it goes.
Who takes the norm alone leaves the stream, and no slope comes back for it.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward


class _NormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight_C)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return rms_norm(_rows(x), weight_C, eps).view(x.shape), x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dnormed: Tensor | None, dstream: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if dnormed is None:
            return dstream, None, None
        x, weight_C = ctx.saved_tensors
        dx, dweight_C = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight_C)
        around = None if dstream is None else _rows(dstream)
        rms_norm_backward(_rows(dnormed), _rows(x), weight_C, ctx.eps, around, _rows(dx), dweight_C, fresh=True)
        return dx, dweight_C, None


def norm_beside(x: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight * x / rms(x) over the last dimension, in the format of x; and x."""
    return _NormBeside.apply(x, weight_C, eps)


def _rows(x: Tensor) -> Tensor:
    """A matrix of rows, over the same memory where its channels lie side by side."""
    x_NC = x.flatten(0, -2) if x.ndim != 2 else x
    return x_NC if x_NC.stride(1) == 1 else x_NC.contiguous()
