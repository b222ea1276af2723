"""Gradients of weights: their dtype, and the memory that they are written to in place.

    dweight_MK = weight_gradient(weight_MK, dy_NM.T, x_NK)      # None: already in weight.grad

An autograd function that returns a gradient has it added to that of earlier micro-batches in a separate pass. Where no
hook wants to see it, the function accumulates it in place and returns none. A weight may have an attribute `main_grad`:
memory for its first gradient in a step, which then is `weight.grad`.
"""

import torch
from torch import Tensor

from llmb.ops.gemm.matmul import matmul
from llmb.ops.loss.scaled_add import scaled_add_


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a weight's gradient: a parameter may ask for a wider one than its own."""
    dtype = weight.grad_dtype if weight.is_leaf else None
    return weight.dtype if dtype is None else dtype


def existing_gradient(weight: Tensor) -> Tensor:
    """Return the gradient of a weight that has one."""
    assert weight.grad is not None
    return weight.grad


def gradient_buffer(weight: Tensor) -> tuple[Tensor | None, bool]:
    """Return `weight.grad` for the caller to write, and whether to add to what it holds.

    None: the gradient is returned to autograd, since hooks want to see it or there is no memory for it yet.
    """
    if not weight.is_leaf or weight._post_accumulate_grad_hooks or weight._backward_hooks:
        return None, False
    if weight.grad is None:
        weight.grad = getattr(weight, "main_grad", None)
        return weight.grad, False
    return (weight.grad, True) if type(weight.grad) is Tensor else (None, False)


def weight_gradient(
    weight_MK: Tensor,
    dy_MN: Tensor,
    x_NK: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    fast: bool = False,
) -> Tensor | None:
    """Return dy @ x for autograd, in the dtype of the weight's gradient; None if it has been written in place."""
    out_MK, accumulate = gradient_buffer(weight_MK)
    addend_MK, dtype = out_MK if accumulate else None, gradient_dtype(weight_MK)
    grad_MK = matmul(dy_MN, x_NK, out=out_MK, addend=addend_MK, dtype=dtype, scales=scales, fast=fast)
    return grad_MK if out_MK is None else None


def accumulate_grad(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Return a gradient in its own dtype, for autograd; None if it has been written or accumulated in place."""
    out, accumulate = gradient_buffer(weight)
    if out is None:
        return grad.to(gradient_dtype(weight))
    if accumulate:
        scaled_add_(out, grad.contiguous(), None, accumulate=True)
    else:
        out.copy_(grad)
    return None
