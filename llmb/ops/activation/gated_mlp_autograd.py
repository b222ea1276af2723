"""A gated MLP as one step of autograd: down(silu(gate(x)) * up(x)), which keeps x, gate and up and nothing else.

    y = gated_mlp(x, gate_FC, up_FC, down_CF)

Gate and up come out of their products side by side, as the activation's kernel wants them (`swiglu.py`). On the way
back the same kernel makes the activation again, for the gradient of down, while it turns gate and up into their slopes:
of the four tensors of the MLP's width that plain autograd keeps, two are left. Those are used up: a second backward
pass is refused. Weights may be wider than x (`linear_autograd.py`). Shapes: N rows, C channels, F the MLP's width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from llmb.ops.activation.swiglu import swiglu, swiglu_backward
from llmb.ops.gemm.linear_autograd import weight_gradient
from llmb.ops.gemm.matmul import multiply


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_FC: Tensor, up_FC: Tensor, down_CF: Tensor) -> Tensor:
        x_NC, width = x.flatten(0, -2), len(gate_FC)
        both_N2F = torch.empty(len(x_NC), 2 * width, dtype=x.dtype, device=x.device)
        for weight, out in zip((gate_FC, up_FC), both_N2F.split(width, dim=1), strict=True):
            multiply(x_NC, weight.to(x.dtype).T, out=out)
        y_NC = multiply(swiglu(both_N2F), down_CF.to(x.dtype).T)
        ctx.save_for_backward(x, both_N2F, gate_FC, up_FC, down_CF)
        ctx.weights = gate_FC, up_FC, down_CF  # themselves: see fused_linear.py
        return y_NC.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, both_N2F, gate_FC, up_FC, down_CF = ctx.saved_tensors
        gate, up, down = ctx.weights
        x_NC, dy_NC = x.flatten(0, -2), dy.flatten(0, -2)
        act_NF = multiply(dy_NC, down_CF.to(dy.dtype))  # the activation's slope, until the next line
        swiglu_backward(act_NF, both_N2F)
        increment_version(both_N2F)
        ddown_CF = weight_gradient(down, dy_NC, act_NF)
        del act_NF
        dgate_NF, dup_NF = both_N2F.split(len(gate_FC), dim=1)
        dx_NC = multiply(dgate_NF, gate_FC.to(dy.dtype))
        multiply(dup_NF, up_FC.to(dy.dtype), out=dx_NC, onto=dx_NC)
        return dx_NC.view_as(x), weight_gradient(gate, dgate_NF, x_NC), weight_gradient(up, dup_NF, x_NC), ddown_CF


def gated_mlp(x: Tensor, gate_FC: Tensor, up_FC: Tensor, down_CF: Tensor) -> Tensor:
    """In the format of x."""
    return _GatedMlp.apply(x, gate_FC, up_FC, down_CF)
