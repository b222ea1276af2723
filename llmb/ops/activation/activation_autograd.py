"""Activation of an MLP, and a gated MLP, each as one autograd function that saves only its inputs.

    act = fused_activation(x, "squared_relu")
    act = fused_activation(gate, "silu", up)      # silu(gate) * up
    y = gated_mlp(x, gate_FC, up_FC, down_CF)     # down(silu(gate(x)) * up(x)), or with another activation

The GEMMs of the gated MLP write gate and up side by side, into one tensor. Its backward recomputes the activation, for
the gradient of down, while it overwrites gate and up with their gradients: of the four tensors of the MLP's width that
plain autograd saves, two are left. They are consumed: a second backward raises. Weights may have a wider dtype than x
(`linear_autograd.py`). Shapes: N rows, C channels, F the MLP's width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from llmb.ops.activation.activation import activation_backward, activation_forward
from llmb.ops.gemm.matmul import matmul
from llmb.ops.gemm.weight_gradient import weight_gradient


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.activation = activation
        return activation_forward(x, activation, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dact: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, up = ctx.saved_tensors
        dx, dup = activation_backward(dact, x, ctx.activation, up)
        return dx, None, dup


def fused_activation(x: Tensor, activation: str, up: Tensor | None = None) -> Tensor:
    """Return activation(x), times `up` if given, in the dtype of x."""
    return _Activation.apply(x, activation, up)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_FC: Tensor, up_FC: Tensor, down_CF: Tensor, activation: str) -> Tensor:
        x_NC, width = x.flatten(0, -2), len(gate_FC)
        gate_up_N2F = torch.empty(len(x_NC), 2 * width, dtype=x.dtype, device=x.device)
        gate_NF, up_NF = gate_up_N2F.split(width, dim=1)
        matmul(x_NC, gate_FC.to(x.dtype).T, out=gate_NF)
        matmul(x_NC, up_FC.to(x.dtype).T, out=up_NF)
        y_NC = matmul(activation_forward(gate_NF, activation, up_NF), down_CF.to(x.dtype).T)
        ctx.save_for_backward(x, gate_up_N2F, gate_FC, up_FC, down_CF)
        ctx.weights = gate_FC, up_FC, down_CF  # the leaves themselves: see linear_autograd.py
        ctx.activation = activation
        return y_NC.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up_N2F, gate_FC, up_FC, down_CF = ctx.saved_tensors
        gate, up, down = ctx.weights
        x_NC, dy_NC = x.flatten(0, -2), dy.flatten(0, -2)
        act_NF = matmul(dy_NC, down_CF.to(dy.dtype))  # dact, until the next line overwrites it
        dgate_NF, dup_NF = gate_up = gate_up_N2F.split(len(gate_FC), dim=1)
        activation_backward(act_NF, dgate_NF, ctx.activation, dup_NF, gate_up, recompute=True)
        increment_version(gate_up_N2F)
        ddown_CF = weight_gradient(down, dy_NC.T, act_NF)
        del act_NF
        dx_NC = matmul(dgate_NF, gate_FC.to(dy.dtype))
        matmul(dup_NF, up_FC.to(dy.dtype), out=dx_NC, addend=dx_NC)
        dgate_FC, dup_FC = weight_gradient(gate, dgate_NF.T, x_NC), weight_gradient(up, dup_NF.T, x_NC)
        return dx_NC.view_as(x), dgate_FC, dup_FC, ddown_CF, None


def gated_mlp(x: Tensor, gate_FC: Tensor, up_FC: Tensor, down_CF: Tensor, activation: str = "silu") -> Tensor:
    """Return down(activation(gate(x)) * up(x)) in the dtype of x."""
    return _GatedMlp.apply(x, gate_FC, up_FC, down_CF, activation)
