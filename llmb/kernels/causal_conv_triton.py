"""The short convolution of Mamba as two Triton kernels; `causal_conv.py` says what it computes.

Both only stream through memory: a tile of tokens and channels is read with the few tokens beside it that the sum
reaches, from the cache after the first time. The backward pass makes the sums again instead of keeping them. Sums are
fp32 whatever x is; the slopes of weights and bias are summed tile by tile, so that the result is always the same.
Channels are numbered group after group; the change to sections is in the addresses, of which the compiler is told how
many in a run follow one another, so that they are still read and written several at once.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_TOKENS = 32
TILE_CHANNELS = 64


@triton.jit
def _by_group(channels, group_stride, GROUP: tl.constexpr, RUN: tl.constexpr):
    """The place of a channel where groups follow one another at a distance."""
    places = channels // GROUP * group_stride + channels % GROUP
    return tl.max_contiguous(tl.multiple_of(places, RUN), RUN)


@triton.jit
def _by_section(channels, width, GROUP: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, RUN: tl.constexpr):
    """The place of a channel where sections follow one another; each group's first is FIRST wide, the others REST."""
    group, inner = channels // GROUP, channels % GROUP
    begin = tl.where(inner < FIRST, 0, FIRST + (inner - FIRST) // REST * REST)
    places = begin * (width // GROUP) + group * tl.where(inner < FIRST, FIRST, REST) + inner - begin
    return tl.max_contiguous(tl.multiple_of(places, RUN), RUN)


@triton.jit
def _rows(base, token_stride, rows, places, there, tokens):
    inside = ((rows >= 0) & (rows < tokens))[:, None] & there[None, :]
    places = base + rows[:, None].to(tl.int64) * token_stride + places[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sum(x, x_token, weight, bias, rows, channels, x_places, tokens, width, REACH: tl.constexpr):
    """bias + sum over k of weight[k] * x[row - REACH + 1 + k]."""
    total = tl.load(bias + channels, mask=channels < width, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(REACH):
        weight_C = tl.load(weight + channels * REACH + k, mask=channels < width, other=0.0).to(tl.float32)
        total = total + weight_C[None, :] * _rows(x, x_token, rows - REACH + 1 + k, x_places, channels < width, tokens)
    return total


@triton.jit
def _forward_kernel(
    x, weight, bias, out, x_batch, x_token, x_group, tokens, width,
    REACH: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, RUN: tl.constexpr,
    TILE_T: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    channels = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    x_places = _by_group(channels, x_group, GROUP, RUN)
    total = _sum(x + batch * x_batch, x_token, weight, bias, rows, channels, x_places, tokens, width, REACH)
    out_places = _by_section(channels, width, GROUP, FIRST, REST, RUN)
    places = out + (batch * tokens + rows[:, None]) * width + out_places[None, :]
    inside = (rows < tokens)[:, None] & (channels < width)[None, :]
    tl.store(places, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    x, weight, bias, dout, dx, dweight, dbias, x_batch, x_token, x_group, dout_batch, dout_token, tokens, width,
    REACH: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, RUN: tl.constexpr,
    TILE_T: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Slopes of x, and this tile's part of those of weight and bias. x[t] is in the sums of t to t + REACH - 1."""
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    channels = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    there = channels < width
    x_places = _by_group(channels, x_group, GROUP, RUN)
    out_places = _by_section(channels, width, GROUP, FIRST, REST, RUN)
    x += batch * x_batch
    dout += batch * dout_batch
    part = (batch * tl.num_programs(0) + tl.program_id(0)) * width + channels
    total = tl.zeros((TILE_T, TILE_C), tl.float32)
    for ahead in tl.static_range(REACH):
        value = _sum(x, x_token, weight, bias, rows + ahead, channels, x_places, tokens, width, REACH)
        opened = tl.sigmoid(value)
        dsilu = _rows(dout, dout_token, rows + ahead, out_places, there, tokens)
        slope = dsilu * opened * (1 + value * (1 - opened))
        weight_C = tl.load(weight + channels * REACH + REACH - 1 - ahead, mask=there, other=0.0)
        total += weight_C.to(tl.float32)[None, :] * slope
        if ahead == 0:
            tl.store(dbias + part, tl.sum(slope, axis=0), mask=there)
            for k in tl.static_range(REACH):
                reached = _rows(x, x_token, rows - REACH + 1 + k, x_places, there, tokens)
                tl.store(dweight + part * REACH + k, tl.sum(slope * reached, axis=0), mask=there)
    places = dx + (batch * tokens + rows[:, None]) * width + channels[None, :]
    inside = (rows < tokens)[:, None] & there[None, :]
    tl.store(places, total.to(dx.dtype.element_ty), mask=inside)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, first: int, rest: int) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        batch, tokens, groups, group = x.shape
        width = groups * group
        out = torch.empty(batch, tokens, width, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(tokens, TILE_TOKENS), triton.cdiv(width, TILE_CHANNELS), batch)
        sizes = {"REACH": weight.shape[-1], "GROUP": group, "FIRST": first, "REST": rest}
        run = math.gcd(x.stride(2), group, first, rest, TILE_CHANNELS)
        sizes |= {"RUN": run, "TILE_T": TILE_TOKENS, "TILE_C": TILE_CHANNELS}
        _forward_kernel[grid](x, weight, bias, out, *x.stride()[:3], tokens, width, **sizes)
        ctx.save_for_backward(x, weight, bias)
        ctx.grid, ctx.sizes = grid, sizes
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        batch, tokens, width = dout.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        parts = batch * ctx.grid[0]
        dweight = torch.empty(parts, *weight.shape, dtype=torch.float32, device=x.device)
        dbias = torch.empty(parts, width, dtype=torch.float32, device=x.device)
        strides = (*x.stride()[:3], *dout.stride()[:2])
        _backward_kernel[ctx.grid](
            x, weight, bias, dout, dx, dweight, dbias, *strides, tokens, width, **ctx.sizes
        )  # fmt: skip
        return dx, dweight.sum(dim=0).to(weight.dtype), dbias.sum(dim=0).to(bias.dtype), None, None


def causal_conv_triton(x_BTGC: Tensor, weight_C1K: Tensor, bias_C: Tensor, sections: tuple[int, ...]) -> Tensor:
    """As `causal_conv.causal_conv`."""
    first, rest = sections[0], sections[-1]
    return _CausalConv.apply(x_BTGC, weight_C1K.contiguous(), bias_C.contiguous(), first, rest)
