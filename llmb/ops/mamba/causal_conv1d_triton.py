"""Causal conv1d of Mamba as two Triton kernels; `causal_conv1d.py` defines what it computes.

Both are memory-bound. The forward kernel reads a tile of tokens and channels and the few tokens before it, from cache
after the first time. The backward kernel recomputes the sums instead of saving them and walks through its tokens, so
that each is computed once. Accumulation is in fp32 whatever x is; gradients of weight and bias are partial sums per
block, so that the result is deterministic.
Channels are numbered in the grouped layout; the change to sections is in the addresses. A compiler hint gives their
contiguity, so that loads and stores are still vectorized.
"""

# mypy: disable-error-code="assignment, operator"
# Tuples in a kernel grow at compile time.

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.tensor_layout import dense_rows

BLOCK_TOKENS = 32
BLOCK_CHANNELS = 128
BACKWARD_TOKENS = 128  # per program of the backward kernel
BACKWARD_CHANNELS = 128  # four per thread of its one warp


@triton.jit
def _grouped_offsets(channels, group_stride, GROUP: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """Return the offsets of channels in the grouped layout."""
    offsets = channels // GROUP * group_stride + channels % GROUP
    return tl.max_contiguous(tl.multiple_of(offsets, CONTIGUOUS), CONTIGUOUS)


@triton.jit
def _sectioned_offsets(
    channels, width, GROUP: tl.constexpr, FIRST: tl.constexpr, OTHER: tl.constexpr, CONTIGUOUS: tl.constexpr
):
    """Return the offsets of channels in the sectioned layout: a group's first section is FIRST wide, others OTHER."""
    group, inner = channels // GROUP, channels % GROUP
    begin = tl.where(inner < FIRST, 0, FIRST + (inner - FIRST) // OTHER * OTHER)
    offsets = begin * (width // GROUP) + group * tl.where(inner < FIRST, FIRST, OTHER) + inner - begin
    return tl.max_contiguous(tl.multiple_of(offsets, CONTIGUOUS), CONTIGUOUS)


@triton.jit
def _load_rows(base, token_stride, rows, offsets, channel_mask, tokens):
    mask = ((rows >= 0) & (rows < tokens))[:, None] & channel_mask[None, :]
    ptrs = base + rows[:, None].to(tl.int64) * token_stride + offsets[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _conv(x, x_token, weight, bias, rows, channels, x_offsets, tokens, width, KERNEL_SIZE: tl.constexpr):
    """bias + sum over k of weight[k] * x[row - KERNEL_SIZE + 1 + k]."""
    acc = tl.load(bias + channels, mask=channels < width, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(KERNEL_SIZE):
        weight_C = tl.load(weight + channels * KERNEL_SIZE + k, mask=channels < width, other=0.0).to(tl.float32)
        x_TC = _load_rows(x, x_token, rows - KERNEL_SIZE + 1 + k, x_offsets, channels < width, tokens)
        acc = acc + weight_C[None, :] * x_TC
    return acc


@triton.jit
def _causal_conv1d_kernel(
    x, weight, bias, out, x_batch, x_token, x_group, tokens, width,
    KERNEL_SIZE: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, OTHER: tl.constexpr, CONTIGUOUS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x_offsets = _grouped_offsets(channels, x_group, GROUP, CONTIGUOUS)
    acc = _conv(x + batch * x_batch, x_token, weight, bias, rows, channels, x_offsets, tokens, width, KERNEL_SIZE)
    out_offsets = _sectioned_offsets(channels, width, GROUP, FIRST, OTHER, CONTIGUOUS)
    out_ptrs = out + (batch * tokens + rows[:, None]) * width + out_offsets[None, :]
    mask = (rows < tokens)[:, None] & (channels < width)[None, :]
    tl.store(out_ptrs, (acc * tl.sigmoid(acc)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_row(base, token_stride, row, offsets, channel_mask, tokens):
    mask = channel_mask & (row >= 0) & (row < tokens)
    return tl.load(base + tl.cast(row, tl.int64) * token_stride + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _causal_conv1d_backward_kernel(
    x, weight, bias, dout, dx, dweight, dbias, x_batch, x_token, x_group, dout_batch, dout_token, tokens, width,
    KERNEL_SIZE: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, OTHER: tl.constexpr, CONTIGUOUS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x of a block of tokens, and its partial sums of those of weight and bias.

    Token by token: x[t] contributes to outputs t to t + K - 1 (K the kernel size), so the last K values and gradients
    are kept in registers, and the gradient of a token's x is complete K - 1 tokens later.
    """
    batch = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0) * BLOCK_T
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < width
    x_offsets = _grouped_offsets(channels, x_group, GROUP, CONTIGUOUS)
    out_offsets = _sectioned_offsets(channels, width, GROUP, FIRST, OTHER, CONTIGUOUS)
    x += batch * x_batch
    dout += batch * dout_batch
    dx += batch * tokens * width + channels
    bias_C = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    zeros = tl.zeros((BLOCK_C,), tl.float32)
    weights, values, grads, dweights = (), (), (), ()
    for k in tl.static_range(KERNEL_SIZE):
        weights += (tl.load(weight + channels * KERNEL_SIZE + k, mask=mask, other=0.0).to(tl.float32),)
        values += (_load_row(x, x_token, begin - KERNEL_SIZE + k, x_offsets, mask, tokens),)
        grads += (zeros,)
        dweights += (zeros,)
    dbias_C = zeros
    next_x = _load_row(x, x_token, begin, x_offsets, mask, tokens)
    next_dout = _load_row(dout, dout_token, begin, out_offsets, mask, tokens)
    for t in range(begin, tl.minimum(begin + BLOCK_T, tokens) + KERNEL_SIZE - 1):
        values = values[1:] + (next_x,)  # noqa: RUF005 (Triton has no unpacking)
        dsilu = next_dout
        next_x = _load_row(x, x_token, t + 1, x_offsets, mask, tokens)
        next_dout = _load_row(dout, dout_token, t + 1, out_offsets, mask, tokens)
        acc = bias_C
        for k in tl.static_range(KERNEL_SIZE):
            acc += weights[k] * values[k]
        sigmoid = tl.sigmoid(acc)
        grad = dsilu * sigmoid * (1 + acc * (1 - sigmoid))
        grads = grads[1:] + (grad,)  # noqa: RUF005
        counted_grad = tl.where(t < begin + BLOCK_T, grad, 0.0)
        dbias_C += counted_grad
        new_dweights, dx_C = (), zeros
        for k in tl.static_range(KERNEL_SIZE):
            new_dweights += (dweights[k] + counted_grad * values[k],)
            dx_C += weights[KERNEL_SIZE - 1 - k] * grads[k]
        dweights = new_dweights
        t_dx = t - KERNEL_SIZE + 1
        dx_ptrs = dx + tl.cast(t_dx, tl.int64) * width
        tl.store(dx_ptrs, dx_C.to(dx.dtype.element_ty), mask=mask & (t_dx >= begin))
    partial = (batch * tl.num_programs(0) + tl.program_id(0)) * width + channels
    tl.store(dbias + partial, dbias_C, mask=mask)
    for k in tl.static_range(KERNEL_SIZE):
        tl.store(dweight + partial * KERNEL_SIZE + k, dweights[k], mask=mask)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, first: int, other: int) -> Tensor:
        x = dense_rows(x)
        batch, tokens, groups, group = x.shape
        width = groups * group
        out = torch.empty(batch, tokens, width, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(tokens, BLOCK_TOKENS), triton.cdiv(width, BLOCK_CHANNELS), batch)
        run = math.gcd(x.stride(2), group, first, other, BLOCK_CHANNELS, BACKWARD_CHANNELS)
        sizes = {"KERNEL_SIZE": weight.shape[-1], "GROUP": group, "FIRST": first, "OTHER": other, "CONTIGUOUS": run}
        _causal_conv1d_kernel[grid](
            x, weight, bias, out, *x.stride()[:3], tokens, width, **sizes, BLOCK_T=BLOCK_TOKENS, BLOCK_C=BLOCK_CHANNELS
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
        grid = (triton.cdiv(tokens, BACKWARD_TOKENS), triton.cdiv(width, BACKWARD_CHANNELS), batch)
        partials = batch * grid[0]
        dweight = torch.empty(partials, *weight.shape, dtype=torch.float32, device=x.device)
        dbias = torch.empty(partials, width, dtype=torch.float32, device=x.device)
        strides = (*x.stride()[:3], *dout.stride()[:2])
        _causal_conv1d_backward_kernel[grid](
            x, weight, bias, dout, dx, dweight, dbias, *strides, tokens, width, **ctx.sizes,
            BLOCK_T=BACKWARD_TOKENS, BLOCK_C=BACKWARD_CHANNELS, num_warps=1,
        )  # fmt: skip
        return dx, dweight.sum(dim=0).to(weight.dtype), dbias.sum(dim=0).to(bias.dtype), None, None


def causal_conv1d_triton(x_BTGC: Tensor, weight_C1K: Tensor, bias_C: Tensor, sections: tuple[int, ...]) -> Tensor:
    """See `causal_conv1d.causal_conv1d`."""
    first, other = sections[0], sections[-1]
    return _CausalConv.apply(x_BTGC, weight_C1K.contiguous(), bias_C.contiguous(), first, other)
