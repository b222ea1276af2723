"""The gated norm of Mamba as two Triton kernels; `gated_norm.py` says what it computes.

One program takes one group of channels of a token, or of several tokens in the backward pass, where it also sums the
slopes of the weights. Nothing but the inputs is kept between the two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dense_rows import dense_rows

BACKWARD_TOKENS = 32  # of one program; more would leave multiprocessors idle, fewer would leave more parts to sum


@triton.jit
def _forward_kernel(
    y, gate, weight, out, y_token, gate_token, gate_group, eps, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    token, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    inner = tl.arange(0, TILE)
    channels, inside = group * WIDTH + inner, inner < WIDTH
    value = tl.load(y + token * y_token + channels, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_token + group * gate_group + inner, mask=inside, other=0.0).to(tl.float32)
    gated = value * opened * tl.sigmoid(opened)
    normed = gated / tl.sqrt(tl.sum(gated * gated) / WIDTH + eps)
    result = normed * tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * groups * WIDTH + channels, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    y, gate, weight, dout, dy, dgate, dweight, y_token, gate_token, gate_group, dout_token, tokens, eps,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    group, groups = tl.program_id(1), tl.num_programs(1)
    inner = tl.arange(0, TILE)
    channels, inside = group * WIDTH + inner, inner < WIDTH
    scale = tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for number in range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + number
        there = inside & (token < tokens)
        value = tl.load(y + token * y_token + channels, mask=there, other=0.0).to(tl.float32)
        opened = tl.load(gate + token * gate_token + group * gate_group + inner, mask=there, other=0.0).to(tl.float32)
        slope = tl.load(dout + token * dout_token + channels, mask=there, other=0.0).to(tl.float32)
        share = tl.sigmoid(opened)
        gated = value * opened * share
        inverse = 1 / tl.sqrt(tl.sum(gated * gated) / WIDTH + eps)
        normed = gated * inverse
        total += slope * normed
        dnormed = slope * scale
        dgated = inverse * (dnormed - normed * (tl.sum(dnormed * normed) / WIDTH))
        place = token * groups * WIDTH + channels
        tl.store(dy + place, (dgated * opened * share).to(dy.dtype.element_ty), mask=there)
        dopened = dgated * value * share * (1 + opened * (1 - share))
        tl.store(dgate + place, dopened.to(dgate.dtype.element_ty), mask=there)
    tl.store(dweight + tl.program_id(0) * groups * WIDTH + channels, total, mask=inside)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NC: Tensor, gate_NGC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        y_NC, gate_NGC = dense_rows(y_NC), dense_rows(gate_NGC)
        tokens, groups, width = gate_NGC.shape
        out_NC = torch.empty(y_NC.shape, dtype=y_NC.dtype, device=y_NC.device)
        _forward_kernel[tokens, groups](
            y_NC, gate_NGC, weight_C, out_NC, y_NC.stride(0), *gate_NGC.stride()[:2], eps,
            WIDTH=width, TILE=triton.next_power_of_2(width),
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
        parts = triton.cdiv(tokens, BACKWARD_TOKENS)
        dweight = torch.empty(parts, groups * width, dtype=torch.float32, device=y_NC.device)
        _backward_kernel[parts, groups](
            y_NC, gate_NGC, weight_C, dout_NC, dy_NC, dgate_NGC, dweight,
            y_NC.stride(0), *gate_NGC.stride()[:2], dout_NC.stride(0), tokens, ctx.eps,
            WIDTH=width, TOKENS=BACKWARD_TOKENS, TILE=triton.next_power_of_2(width),
        )  # fmt: skip
        return dy_NC, dgate_NGC, dweight.sum(dim=0).to(weight_C.dtype), None


def gated_norm_triton(y_BTC: Tensor, gate_BTGC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """As `gated_norm.gated_norm`."""
    out_NC = _GatedNorm.apply(y_BTC.flatten(0, 1), gate_BTGC.flatten(0, 1), weight_C.contiguous(), eps)
    return out_NC.unflatten(0, y_BTC.shape[:2])
