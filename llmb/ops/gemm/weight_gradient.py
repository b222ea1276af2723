"""Gradients of weights: their dtype, and whether a GEMM may accumulate into them in place.

An autograd function that returns a gradient has it added to that of earlier micro-batches in a separate pass. Where no
hook wants to see it, the function accumulates it in place and returns none.
"""

import torch
from torch import Tensor


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a weight's gradient: a parameter may ask for a wider one than its own."""
    dtype = weight.grad_dtype if weight.is_leaf else None
    return weight.dtype if dtype is None else dtype


def accumulated_grad(weight: Tensor) -> Tensor | None:
    """Return the gradient to accumulate into in place; None if there is none yet, or hooks want to see additions."""
    grad = weight.grad if weight.is_leaf else None
    if type(grad) is not Tensor or weight._post_accumulate_grad_hooks or weight._backward_hooks:
        return None
    return grad


def accumulate_grad(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Return a gradient in its own dtype, for autograd; None if it has been accumulated in place."""
    total = accumulated_grad(weight)
    if total is None:
        return grad.to(gradient_dtype(weight))
    total.add_(grad)
    return None
