"""Linear layers whose three GEMMs take fp8 operands, with per-tensor scales computed at each use.

    out = fp8_linear(x, weight)         # x [..., in] in bf16, weight [out, in] in fp32; differentiable

Activations and weights are quantized to e4m3, gradients to e5m2 (`llmb/ops/quant/fp8_quant.py`). GEMMs accumulate in
fp32 and dequantize their output: to the dtype of x, or to that of the weight's gradient, which may accumulate in fp32.

On a GPU the GEMMs (`matmul.py`) take both operands contiguous along the summed dimension: hence the same values in two
layouts, `rows` and `columns`, written together by one Triton kernel. Anywhere else the same arithmetic is done on the
same fp8 values in fp32.

Shapes: M tokens, K inputs, N outputs of a layer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from llmb.ops.gemm.matmul import matmul
from llmb.ops.gemm.weight_gradient import gradient_dtype
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2, FP8_ALIGNMENT, Fp8Tensor, cast_to_fp8, fake_quantize, tensor_scale


def fits_fp8(tokens: int, inputs: int, outputs: int) -> bool:
    """Return whether a layer's GEMMs can be done in fp8; the one place where this is decided, for all devices alike.

    Each dimension is summed over in one of the three GEMMs, so each must be a multiple of 16.
    """
    return tokens > 0 and all(size % FP8_ALIGNMENT == 0 for size in (tokens, inputs, outputs))


_quantized_activations = WeakIdKeyDictionary()  # activations that are still alive -> (their version, Fp8Tensor)


def activation_to_fp8(x: Tensor) -> Fp8Tensor:
    """Quantize an activation to e4m3, once for all layers that read it, as q, k and v do, or gate and up."""
    version, x8 = _quantized_activations.get(x, (None, None))
    if x8 is None or version != x._version:
        with torch.no_grad():
            x_MK = x.flatten(0, -2)
            x8 = cast_to_fp8(x_MK, tensor_scale(x_MK, E4M3), E4M3, rows=True, columns=True)
        _quantized_activations[x] = (x._version, x8)
    return x8


class _Fp8Linear(torch.autograd.Function):
    """Saves the activation in fp8 for the backward pass; the weight is cast again there, which costs no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, x8: Fp8Tensor, fp8_fast_accum: bool) -> Tensor:
        bf16_weight_NK = weight_NK.to(x.dtype)  # as where weights are stored so, or are all-gathered so
        w8 = cast_to_fp8(bf16_weight_NK, tensor_scale(bf16_weight_NK, E4M3), E4M3, rows=True)
        ctx.save_for_backward(x8.columns, x8.scale, weight_NK, w8.scale)
        ctx.weight, ctx.fp8_fast_accum = weight_NK, fp8_fast_accum  # the leaf itself: see linear_autograd.py
        out_MN = matmul(x8.rows, w8.rows.T, dtype=x.dtype, scales=(x8.scale, w8.scale), fast=True)
        return out_MN.unflatten(0, x.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_columns, x_scale, weight_NK, w_scale = ctx.saved_tensors
        grad_MN = grad.flatten(0, -2)
        g8 = cast_to_fp8(grad_MN, tensor_scale(grad_MN, E5M2), E5M2, rows=True, columns=True)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            w8 = cast_to_fp8(weight_NK.to(grad.dtype), w_scale, E4M3, columns=True)
            scales = (g8.scale, w_scale)
            grad_x_MK = matmul(g8.rows, w8.columns.T, dtype=grad.dtype, scales=scales, fast=ctx.fp8_fast_accum)
            grad_x = grad_x_MK.unflatten(0, grad.shape[:-1])
        if ctx.needs_input_grad[1]:
            dtype, scales = gradient_dtype(ctx.weight), (g8.scale, x_scale)
            grad_weight = matmul(g8.columns, x_columns.T, dtype=dtype, scales=scales, fast=ctx.fp8_fast_accum)
        return grad_x, grad_weight, None, None


def fp8_linear(x: Tensor, weight_NK: Tensor, fp8_fast_accum: bool = False) -> Tensor:
    """Return x @ weight.T with fp8 operands, in the dtype of x; see `fits_fp8` for the supported shapes.

    The forward pass uses fast accumulation; with `fp8_fast_accum` the backward pass does too.
    """
    return _Fp8Linear.apply(x, weight_NK, activation_to_fp8(x), fp8_fast_accum)


def fp8_linear_reference(x_MK: Tensor, weight_NK: Tensor, grad_MN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and both gradients in plain steps, with explicit rounding instead of fp8 dtypes."""
    (x, x_scale), (weight, w_scale) = fake_quantize(x_MK, E4M3), fake_quantize(weight_NK.to(x_MK.dtype), E4M3)
    grad, g_scale = fake_quantize(grad_MN, E5M2)
    out_MN = (x @ weight.T) * (x_scale * w_scale)
    grad_x_MK = (grad @ weight) * (g_scale * w_scale)
    grad_weight_NK = (grad.T @ x) * (g_scale * x_scale)
    return out_MN.to(x_MK.dtype), grad_x_MK.to(grad_MN.dtype), grad_weight_NK.to(weight_NK.dtype)
