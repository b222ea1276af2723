"""Linear layers whose three matrix products take 8-bit operands, with one scale a tensor found afresh at each use.

    out = fp8_linear(x, weight)         # x [..., in] in bf16, weight [out, in] in fp32; differentiable

A tensor is divided by scale = (its largest magnitude) / (the largest number of the format) and rounded. Activations and
weights become e4m3 (3 bits of mantissa), gradients e5m2 (2 bits, but reach further down). Products add in fp32 and are
scaled back on the way out: to the format of x, or to fp32 for the weight's gradient, which accumulates there.

A tensor with an infinity or a NaN gets a scale that is infinite or NaN, so all it touches becomes NaN and the run ends
as diverged: the format's own habit of clipping what is too large never sees such a number.

On a GPU the products (`matmul.py`) want both operands contiguous along the summed dimension: hence
the same values in two layouts, `rows` and `columns`, written together by one Triton kernel. Anywhere else the same
arithmetic is done on the same 8-bit values in fp32.

Shapes: M tokens, K inputs, N outputs of a layer.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from llmb.ops.dispatch import on_gpu
from llmb.ops.gemm.matmul import multiply
from llmb.ops.gemm.weight_gradient import gradient_dtype
from llmb.ops.quant.activation_quant import E4M3, SMALLEST_AMAX

E5M2 = torch.float8_e5m2
MULTIPLE = 16  # the hardware's products take only dimensions that are multiples of this


class Fp8(NamedTuple):
    """A matrix [M, N] in 8 bits: values times scale. A layout that nobody asked for is an empty tensor."""

    rows: Tensor  # [M, N], contiguous
    columns: Tensor  # [N, M], contiguous: the transpose
    scale: Tensor  # fp32, a scalar on the device


def fits_fp8(tokens: int, inputs: int, outputs: int) -> bool:
    """Whether a layer's products can be done in 8 bits; the one place where this is decided, for all devices alike.

    Each dimension is summed over in one of the three products, so each must be a multiple of 16.
    """
    return tokens > 0 and all(size % MULTIPLE == 0 for size in (tokens, inputs, outputs))


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a tensor is divided by before it is rounded to `dtype`; a scalar that stays on the device."""
    largest = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
    # A product, not a quotient: CUDA divides by a number by way of its inverse, and a CPU must give the same bits.
    return largest.clamp(min=SMALLEST_AMAX) * (1 / torch.finfo(dtype).max)


def cast(x_MN: Tensor, scale: Tensor, dtype: torch.dtype, *, rows: bool = False, columns: bool = False) -> Fp8:
    """A matrix divided by a known scale and rounded to 8 bits, in the layouts asked for."""
    m, n = x_MN.shape
    if on_gpu(x_MN):
        from llmb.ops.quant.fp8_cast_triton import cast_tiles  # Triton is there wherever torch has CUDA, and only there

        rows_MN = torch.empty((m, n) if rows else 0, dtype=dtype, device=x_MN.device)
        columns_NM = torch.empty((n, m) if columns else 0, dtype=dtype, device=x_MN.device)
        cast_tiles(x_MN.contiguous(), scale, rows_MN, columns_NM)
        return Fp8(rows_MN, columns_NM, scale)
    values_MN = (x_MN.float() * scale.reciprocal()).to(dtype)
    empty = values_MN.new_empty(0)
    return Fp8(values_MN if rows else empty, values_MN.T.contiguous() if columns else empty, scale)


_already_cast = WeakIdKeyDictionary()  # activations that are still alive -> (their version, Fp8)


def activation_in_fp8(x: Tensor) -> Fp8:
    """An activation as a matrix in e4m3, made once for all layers that read it, as q, k and v do, or gate and up."""
    version, made = _already_cast.get(x, (None, None))
    if made is None or version != x._version:
        with torch.no_grad():
            x_MK = x.flatten(0, -2)
            made = cast(x_MK, scale_of(x_MK, E4M3), E4M3, rows=True, columns=True)
        _already_cast[x] = (x._version, made)
    return made


class _Fp8Linear(torch.autograd.Function):
    """Keeps the activation in 8 bits for the backward pass; the weight is cast again there, which costs no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, x8: Fp8, fast_sums: bool) -> Tensor:
        narrow_NK = weight_NK.to(x.dtype)  # as where weights are kept so, or come so from other ranks
        w8 = cast(narrow_NK, scale_of(narrow_NK, E4M3), E4M3, rows=True)
        ctx.save_for_backward(x8.columns, x8.scale, weight_NK, w8.scale)
        ctx.weight, ctx.fast_sums = weight_NK, fast_sums  # itself: see fused_linear.py
        out_MN = multiply(x8.rows, w8.rows.T, dtype=x.dtype, scales=(x8.scale, w8.scale), fast=True)
        return out_MN.unflatten(0, x.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_columns, x_scale, weight_NK, w_scale = ctx.saved_tensors
        grad_MN = grad.flatten(0, -2)
        g8 = cast(grad_MN, scale_of(grad_MN, E5M2), E5M2, rows=True, columns=True)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            w8 = cast(weight_NK.to(grad.dtype), w_scale, E4M3, columns=True)
            scales = (g8.scale, w_scale)
            grad_x_MK = multiply(g8.rows, w8.columns.T, dtype=grad.dtype, scales=scales, fast=ctx.fast_sums)
            grad_x = grad_x_MK.unflatten(0, grad.shape[:-1])
        if ctx.needs_input_grad[1]:
            dtype, scales = gradient_dtype(ctx.weight), (g8.scale, x_scale)
            grad_weight = multiply(g8.columns, x_columns.T, dtype=dtype, scales=scales, fast=ctx.fast_sums)
        return grad_x, grad_weight, None, None


def fp8_linear(x: Tensor, weight_NK: Tensor, fast_sums: bool = False) -> Tensor:
    """x @ weight.T with 8-bit operands, in the format of x; see `fits_fp8` for which shapes it takes.

    Going forward the GPU adds with fewer bits; with `fast_sums` on the way back too.
    """
    return _Fp8Linear.apply(x, weight_NK, activation_in_fp8(x), fast_sums)


def fp8_linear_reference(x_MK: Tensor, weight_NK: Tensor, grad_MN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output and both gradients in plain steps, with the rounding spelled out and no 8-bit type in sight."""
    (x, x_scale), (weight, w_scale) = rounded(x_MK, E4M3), rounded(weight_NK.to(x_MK.dtype), E4M3)
    grad, g_scale = rounded(grad_MN, E5M2)
    out_MN = (x @ weight.T) * (x_scale * w_scale)
    grad_x_MK = (grad @ weight) * (g_scale * w_scale)
    grad_weight_NK = (grad.T @ x) * (g_scale * x_scale)
    return out_MN.to(x_MK.dtype), grad_x_MK.to(grad_MN.dtype), grad_weight_NK.to(weight_NK.dtype)


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """The nearest numbers of the format, ties to even, in fp32, and what they are to be multiplied by.

    That is one number, or one for each of those that lie along a dimension.
    """
    limits = torch.finfo(dtype)
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest.float().clamp(min=SMALLEST_AMAX) * (1 / limits.max)
    values = x.float() * scale.reciprocal()
    exponent = (torch.frexp(values).exponent - 1).clamp(min=round(math.log2(limits.smallest_normal)))
    step = torch.ldexp(torch.full_like(values, limits.eps), exponent)  # between neighbours at this magnitude
    return (values / step).round() * step, scale
