"""Number formats, applied to a finished model from outside.

bf16: the parameters stay in fp32 and are the master weights that the optimizer updates. Activations are bf16 from the
embedding on, and each matrix product casts its weight when it is used. The cast copy is dropped at once and made again
in the backward pass: that costs a few percent of the time and saves two bytes a parameter, so that weights, gradients
and both Adam moments take 16 bytes a parameter. Gradients accumulate in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmb.models.architectures import Network


class _CastProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad @ weight.to(grad.dtype), grad_weight.to(weight.dtype)


class CastLinear(nn.Linear):
    """A linear layer whose weight is wider than its input: computes in the input's format."""

    def forward(self, x: Tensor) -> Tensor:
        return _CastProduct.apply(x, self.weight)


def compute_in_bf16(network: Network) -> None:
    """Make a network with fp32 parameters compute in bf16."""
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, _cast(child))
    network.embedding.register_forward_hook(lambda _module, _args, stream: stream.to(torch.bfloat16))


def _cast(linear: nn.Linear) -> CastLinear:
    cast = CastLinear(linear.in_features, linear.out_features, bias=False, device="meta")
    cast.weight = linear.weight
    return cast
