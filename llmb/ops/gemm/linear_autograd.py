"""Linear layers whose weights may be wider than what they compute in, and whose gradients grow inside the products.

    y = linear(x, weight)                            # x [..., K] in bf16, weight [M, K] in fp32 or bf16; differentiable
    q, k, v = linears(x, q_weight, k_weight, v_weight)      # of one input, whose slope is added up in the same way

A wider weight is cast as it is used, and again on the way back: a copy that is kept would cost its memory. Its gradient
comes out of the product in the format in which the weight wants it. Where micro-batches add up and the weight has a
gradient already, the product adds to it there and then, which reads and writes it once; autograd would make another
and then add the two.
Shapes: N rows, K inputs, M outputs.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.gemm.matmul import multiply
from llmb.ops.gemm.weight_gradient import gradient_dtype, growing_gradient


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.weights = weights  # themselves, with the gradients they have; a layer that is computed again saves aliases
        made = (multiply(x.flatten(0, -2), weight_MK.to(x.dtype).T) for weight_MK in weights)
        return tuple(y_NM.unflatten(0, x.shape[:-1]) for y_NM in made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_NK, slopes = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
        dx_NK = multiply(slopes[0], weights[0].to(x.dtype))
        for dy_NM, weight_MK in zip(slopes[1:], weights[1:], strict=True):
            multiply(dy_NM, weight_MK.to(x.dtype), out=dx_NK, onto=dx_NK)
        pairs = zip(ctx.weights, slopes, strict=True)
        return dx_NK.view_as(x), *(weight_gradient(weight_MK, dy_NM, x_NK) for weight_MK, dy_NM in pairs)


def linear(x: Tensor, weight_MK: Tensor) -> Tensor:
    """x @ weight.T in the format of x."""
    return _Linears.apply(x, weight_MK)[0]


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The same with several weights."""
    return _Linears.apply(x, *weights)


def weight_gradient(weight_MK: Tensor, dy_NM: Tensor, x_NK: Tensor) -> Tensor | None:
    """dy.T @ x for a weight, in its gradient's format; None: it has been added to the gradient that was there."""
    total_MK = growing_gradient(weight_MK)
    if total_MK is None:
        return multiply(dy_NM.T, x_NK, dtype=gradient_dtype(weight_MK))
    multiply(dy_NM.T, x_NK, out=total_MK, onto=total_MK)
    return None
