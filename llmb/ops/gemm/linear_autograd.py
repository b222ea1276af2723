"""Linear layers whose weights may be wider than their inputs, and whose GEMMs accumulate gradients in place.

    y = linear(x, weight)                            # x [..., K] in bf16, weight [M, K] in fp32 or bf16; differentiable
    q, k, v = linears(x, q_weight, k_weight, v_weight)      # of one input, whose gradient is accumulated the same way

A wider weight is cast as it is used, and again in the backward pass: a saved copy would cost memory. Its gradient comes
out of the GEMM in the dtype that the weight asks for. Where micro-batches accumulate and the weight has a gradient
already, the GEMM adds to it, which reads and writes it once; autograd would allocate another and then add the two
(`weight_gradient.py`).

Shapes: N rows, K inputs, M outputs.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.gemm.matmul import matmul
from llmb.ops.gemm.weight_gradient import weight_gradient


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.weights = weights  # the leaves, with their gradients; under recomputation the saved tensors are aliases
        outputs = (matmul(x.flatten(0, -2), weight_MK.to(x.dtype).T) for weight_MK in weights)
        return tuple(y_NM.unflatten(0, x.shape[:-1]) for y_NM in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_NK, dys = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
        dx_NK = matmul(dys[0], weights[0].to(x.dtype))
        for dy_NM, weight_MK in zip(dys[1:], weights[1:], strict=True):
            matmul(dy_NM, weight_MK.to(x.dtype), out=dx_NK, addend=dx_NK)
        pairs = zip(ctx.weights, dys, strict=True)
        return dx_NK.view_as(x), *(weight_gradient(weight_MK, dy_NM.T, x_NK) for weight_MK, dy_NM in pairs)


def linear(x: Tensor, weight_MK: Tensor) -> Tensor:
    """Return x @ weight.T in the dtype of x."""
    return _Linears.apply(x, weight_MK)[0]


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return x @ weight.T for several weights."""
    return _Linears.apply(x, *weights)
