"""Triton kernels of the gated RMSNorm and its backward, as an autograd function.

One program takes one group of channels of a token, or of several tokens in the backward, where it also sums the
gradients of the weights. Only the inputs are saved between the two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.tensor_layout import dense_rows

BACKWARD_TOKENS = 32  # of one program; more would leave SMs idle, fewer would leave more partial sums


@triton.jit
def _gated_norm(
    y_ptr, gate_ptr, weight_ptr, out_ptr, y_stride, gate_stride, group_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, BLOCK)
    c, mask = group * WIDTH + i, i < WIDTH
    y = tl.load(y_ptr + token * y_stride + c, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + group * group_stride + i, mask=mask, other=0.0).to(tl.float32)
    gated = y * gate * tl.sigmoid(gate)
    normed = gated / tl.sqrt(tl.sum(gated * gated) / WIDTH + eps)
    out = normed * tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * groups * WIDTH + c, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_norm_backward(
    y_ptr, gate_ptr, weight_ptr, dout_ptr, dy_ptr, dgate_ptr, partials_ptr, y_stride, gate_stride, group_stride,
    dout_stride, tokens, eps, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, groups = tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, BLOCK)
    c, mask = group * WIDTH + i, i < WIDTH
    weight = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for number in range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + number
        token_mask = mask & (token < tokens)
        y = tl.load(y_ptr + token * y_stride + c, mask=token_mask, other=0.0).to(tl.float32)
        gate_at = gate_ptr + token * gate_stride + group * group_stride + i
        gate = tl.load(gate_at, mask=token_mask, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + token * dout_stride + c, mask=token_mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        gated = y * gate * sigmoid
        inverse = 1 / tl.sqrt(tl.sum(gated * gated) / WIDTH + eps)
        normed = gated * inverse
        dweight += dout * normed
        dnormed = dout * weight
        dgated = inverse * (dnormed - normed * (tl.sum(dnormed * normed) / WIDTH))
        offsets = token * groups * WIDTH + c
        tl.store(dy_ptr + offsets, (dgated * gate * sigmoid).to(dy_ptr.dtype.element_ty), mask=token_mask)
        dgate = dgated * y * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(dgate_ptr + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=token_mask)
    tl.store(partials_ptr + tl.program_id(0) * groups * WIDTH + c, dweight, mask=mask)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NC: Tensor, gate_NGC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        y_NC, gate_NGC = dense_rows(y_NC), dense_rows(gate_NGC)
        tokens, groups, width = gate_NGC.shape
        out_NC = torch.empty(y_NC.shape, dtype=y_NC.dtype, device=y_NC.device)
        _gated_norm[tokens, groups](
            y_NC, gate_NGC, weight_C, out_NC, y_NC.stride(0), *gate_NGC.stride()[:2], eps,
            WIDTH=width, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
        ctx.save_for_backward(y_NC, gate_NGC, weight_C)
        ctx.eps = eps
        return out_NC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_NC: Tensor) -> tuple[Tensor | None, ...]:
        y_NC, gate_NGC, weight_C = ctx.saved_tensors
        dout_NC = dense_rows(dout_NC)
        tokens, groups, width = gate_NGC.shape
        dy_NC = torch.empty(y_NC.shape, dtype=y_NC.dtype, device=y_NC.device)
        dgate_NGC = torch.empty(gate_NGC.shape, dtype=gate_NGC.dtype, device=y_NC.device)
        programs = triton.cdiv(tokens, BACKWARD_TOKENS)
        partials_PC = torch.empty(programs, groups * width, dtype=torch.float32, device=y_NC.device)
        _gated_norm_backward[programs, groups](
            y_NC, gate_NGC, weight_C, dout_NC, dy_NC, dgate_NGC, partials_PC,
            y_NC.stride(0), *gate_NGC.stride()[:2], dout_NC.stride(0), tokens, ctx.eps,
            WIDTH=width, TOKENS=BACKWARD_TOKENS, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
        return dy_NC, dgate_NGC, partials_PC.sum(dim=0).to(weight_C.dtype), None


def gated_norm_triton(y_BTC: Tensor, gate_BTGC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Launch the kernels of `gated_norm.gated_norm`; differentiable."""
    out_NC = _GatedNorm.apply(y_BTC.flatten(0, 1), gate_BTGC.flatten(0, 1), weight_C.contiguous(), eps)
    return out_NC.unflatten(0, y_BTC.shape[:2])
