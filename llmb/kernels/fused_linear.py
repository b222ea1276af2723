"""Linear layers whose weights may be wider than what they compute in, and whose gradients grow inside the products.

    y = linear(x, weight)                            # x [..., K] in bf16, weight [M, K] in fp32 or bf16; differentiable
    q, k, v = linears(x, q_weight, k_weight, v_weight)      # of one input, whose slope is added up in the same way

A wider weight is cast as it is used, and again on the way back: a copy that is kept would cost its memory. Its gradient
comes out of the product in the format in which the weight wants it. Where micro-batches add up and the weight has a
gradient already, the product adds to it there and then, which reads and writes it once; autograd would make another
and then add the two.
Shapes: N rows, K inputs, M outputs.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.kernels.triton_device import on_gpu, rehearsing
from llmb.kernels.weight_gradient import gradient_dtype, growing_gradient


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.weights = weights  # themselves, with the gradients they have; a layer that is computed again saves aliases
        return tuple(F.linear(x, weight_MK.to(x.dtype)) for weight_MK in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_NK, slopes = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
        dx_NK = slopes[0] @ weights[0].to(x.dtype)
        for dy_NM, weight_MK in zip(slopes[1:], weights[1:], strict=True):
            dx_NK.addmm_(dy_NM, weight_MK.to(x.dtype))
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
        return product_as(gradient_dtype(weight_MK), dy_NM.T, x_NK)
    add_product_(total_MK, dy_NM.T, x_NK)
    return None


def product_as(dtype: torch.dtype, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right, added up in fp32 and rounded once, to a format that may be wider than theirs."""
    if left.dtype == dtype:
        return torch.mm(left, right, out=out)
    if on_gpu(left):
        return torch.mm(left, right, out_dtype=dtype, out=out)
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where total may be wider."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif on_gpu(left) and _adds_to_fp32(left.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(product_as(total.dtype, left, right))


@cache
def _adds_to_fp32(device: torch.device) -> bool:
    """Whether this torch adds a product of bf16 to fp32 in one step; the first that had the call wanted bf16 there."""
    if rehearsing():  # there is no GPU to ask
        return True
    total, bf16 = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
    try:
        torch.addmm(total, bf16, bf16, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
