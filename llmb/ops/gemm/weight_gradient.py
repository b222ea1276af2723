"""Gradients of weights: the format each is kept in, and whether a product may add to it where it lies.

A step of autograd that returns a gradient has it added to the one of earlier micro-batches in a pass of its own. Where
nobody asked to see it, the step adds it there and then, and returns none.
"""

import torch
from torch import Tensor


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """The format of a weight's gradient: a parameter may ask for a wider one than its own."""
    dtype = weight.grad_dtype if weight.is_leaf else None
    return weight.dtype if dtype is None else dtype


def growing_gradient(weight: Tensor) -> Tensor | None:
    """The gradient to add to in place: it is this very tensor's, and nobody asked to see what is added; else None."""
    grad = weight.grad if weight.is_leaf else None
    if type(grad) is not Tensor or weight._post_accumulate_grad_hooks or weight._backward_hooks:
        return None
    return grad


def settled(weight: Tensor, found: Tensor) -> Tensor | None:
    """A gradient in its own format, for autograd; None: it has been added to the one that was there."""
    total = growing_gradient(weight)
    if total is None:
        return found.to(gradient_dtype(weight))
    total.add_(found)
    return None
