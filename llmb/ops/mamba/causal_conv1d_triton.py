"""The short convolution of Mamba as two Triton kernels; `causal_conv1d.py` says what it computes.

Both only stream through memory. Forward a tile of tokens and channels is read with the few tokens beside it that the
sum reaches, from the cache after the first time. The backward pass makes the sums again instead of keeping them, and
walks through its tokens, so that each is made once. Sums are fp32 whatever x is; the slopes of weights and bias are
summed span by span, so that the result is always the same.
Channels are numbered group after group; the change to sections is in the addresses, of which the compiler is told how
many in a run follow one another, so that they are still read and written several at once.
"""

# mypy: disable-error-code="assignment, operator"
# A kernel's tuples grow while it is compiled.

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dense_rows import dense_rows

TILE_TOKENS = 32
TILE_CHANNELS = 128
SPAN_TOKENS = 128  # that a program of the backward pass walks through
SPAN_CHANNELS = 128  # four of each thread: a span has one warp


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
def _row(base, token_stride, row, places, there, tokens):
    inside = there & (row >= 0) & (row < tokens)
    return tl.load(base + tl.cast(row, tl.int64) * token_stride + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _backward_kernel(
    x, weight, bias, dout, dx, dweight, dbias, x_batch, x_token, x_group, dout_batch, dout_token, tokens, width,
    REACH: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, RUN: tl.constexpr,
    SPAN: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Slopes of x of a span of tokens, and its part of those of weight and bias.

    Token by token: x[t] is in the sums of t to t + REACH - 1, so that the last REACH values and slopes are at hand, and
    the slope of a token's x is known REACH - 1 tokens later.
    """
    batch = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0) * SPAN
    channels = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    there = channels < width
    x_places = _by_group(channels, x_group, GROUP, RUN)
    out_places = _by_section(channels, width, GROUP, FIRST, REST, RUN)
    x += batch * x_batch
    dout += batch * dout_batch
    dx += batch * tokens * width + channels
    bias_C = tl.load(bias + channels, mask=there, other=0.0).to(tl.float32)
    nothing = tl.zeros((TILE_C,), tl.float32)
    weights, values, slopes, dweights = (), (), (), ()
    for k in tl.static_range(REACH):
        weights += (tl.load(weight + channels * REACH + k, mask=there, other=0.0).to(tl.float32),)
        values += (_row(x, x_token, begin - REACH + k, x_places, there, tokens),)
        slopes += (nothing,)
        dweights += (nothing,)
    dbias_C = nothing
    next_x = _row(x, x_token, begin, x_places, there, tokens)
    next_dout = _row(dout, dout_token, begin, out_places, there, tokens)
    for t in range(begin, tl.minimum(begin + SPAN, tokens) + REACH - 1):
        values = values[1:] + (next_x,)  # noqa: RUF005 (Triton knows no stars)
        dsilu = next_dout
        next_x = _row(x, x_token, t + 1, x_places, there, tokens)
        next_dout = _row(dout, dout_token, t + 1, out_places, there, tokens)
        total = bias_C
        for k in tl.static_range(REACH):
            total += weights[k] * values[k]
        opened = tl.sigmoid(total)
        slope = dsilu * opened * (1 + total * (1 - opened))
        slopes = slopes[1:] + (slope,)  # noqa: RUF005
        own = tl.where(t < begin + SPAN, slope, 0.0)
        dbias_C += own
        added, made = (), nothing
        for k in tl.static_range(REACH):
            added += (dweights[k] + own * values[k],)
            made += weights[REACH - 1 - k] * slopes[k]
        dweights = added
        t_made = t - REACH + 1
        place = dx + tl.cast(t_made, tl.int64) * width
        tl.store(place, made.to(dx.dtype.element_ty), mask=there & (t_made >= begin))
    part = (batch * tl.num_programs(0) + tl.program_id(0)) * width + channels
    tl.store(dbias + part, dbias_C, mask=there)
    for k in tl.static_range(REACH):
        tl.store(dweight + part * REACH + k, dweights[k], mask=there)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, first: int, rest: int) -> Tensor:
        x = dense_rows(x)
        batch, tokens, groups, group = x.shape
        width = groups * group
        out = torch.empty(batch, tokens, width, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(tokens, TILE_TOKENS), triton.cdiv(width, TILE_CHANNELS), batch)
        run = math.gcd(x.stride(2), group, first, rest, TILE_CHANNELS, SPAN_CHANNELS)
        sizes = {"REACH": weight.shape[-1], "GROUP": group, "FIRST": first, "REST": rest, "RUN": run}
        _forward_kernel[grid](
            x, weight, bias, out, *x.stride()[:3], tokens, width, **sizes, TILE_T=TILE_TOKENS, TILE_C=TILE_CHANNELS
        )
        ctx.save_for_backward(x, weight, bias)
        ctx.sizes = sizes
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dout = dense_rows(dout)
        batch, tokens, width = dout.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(tokens, SPAN_TOKENS), triton.cdiv(width, SPAN_CHANNELS), batch)
        parts = batch * grid[0]
        dweight = torch.empty(parts, *weight.shape, dtype=torch.float32, device=x.device)
        dbias = torch.empty(parts, width, dtype=torch.float32, device=x.device)
        strides = (*x.stride()[:3], *dout.stride()[:2])
        _backward_kernel[grid](
            x, weight, bias, dout, dx, dweight, dbias, *strides, tokens, width, **ctx.sizes,
            SPAN=SPAN_TOKENS, TILE_C=SPAN_CHANNELS, num_warps=1,
        )  # fmt: skip
        return dx, dweight.sum(dim=0).to(weight.dtype), dbias.sum(dim=0).to(bias.dtype), None, None


def causal_conv_triton(x_BTGC: Tensor, weight_C1K: Tensor, bias_C: Tensor, sections: tuple[int, ...]) -> Tensor:
    """As `causal_conv.causal_conv`."""
    first, rest = sections[0], sections[-1]
    return _CausalConv.apply(x_BTGC, weight_C1K.contiguous(), bias_C.contiguous(), first, rest)
