"""Linear layers whose three GEMMs take fp8 operands, with one scale per tensor.

    names = OperandNames("layers.3.attention.q.x", "layers.3.attention.q.weight", "layers.3.attention.q.dy")
    scaling = DelayedScaling(names.dtypes, device)              # or CurrentScaling: `delayed_scaling.py`
    out = fp8_linear(x, weight, scaling, names)         # x [..., in] in bf16, weight [out, in]; differentiable

Activations and weights are quantized to e4m3, gradients to e5m2 (`llmb/ops/quant/fp8_quant.py`). GEMMs accumulate in
fp32 and dequantize their output: to the dtype of x, or to that of the weight's gradient, which accumulates in place
(`weight_gradient.py`).

On a GPU the GEMMs (`matmul.py`) take both operands contiguous along the summed dimension: hence the same values in two
layouts, `rows` and `columns`, written together by one Triton kernel. Anywhere else the same arithmetic is done on the
same fp8 values in fp32.

Shapes: M tokens, K inputs, N outputs of a layer.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from llmb.ops.gemm.matmul import matmul
from llmb.ops.gemm.weight_gradient import weight_gradient
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import Scaling
from llmb.ops.quant.fp8_quant import E5M2, FP8_ALIGNMENT, Fp8Tensor, cast_to_fp8, fake_quantize, quantize_fp8
from llmb.ops.tensor_layout import dense_rows


class OperandNames(NamedTuple):
    """Names of a layer's fp8 tensors; layers that read the same activation have one name for it."""

    x: str
    weight: str
    dy: str

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes, as a scaling takes them."""
        return {self.x: E4M3, self.weight: E4M3, self.dy: E5M2}


def fits_fp8(tokens: int, inputs: int, outputs: int) -> bool:
    """Return whether a layer's GEMMs can be done in fp8; the one place where this is decided, for all devices alike.

    Each dimension is summed over in one of the three GEMMs, so each must be a multiple of 16.
    """
    return tokens > 0 and all(size % FP8_ALIGNMENT == 0 for size in (tokens, inputs, outputs))


# Activations that are still alive -> (their version, that of the scale, Fp8Tensor).
_quantized_activations = WeakIdKeyDictionary()


def activation_to_fp8(x: Tensor, scaling: Scaling, name: str) -> Fp8Tensor:
    """Quantize an activation to e4m3, once for all layers that read it, as q, k and v do, or gate and up."""
    version, scale_version, x8 = _quantized_activations.get(x, (None, None, None))
    if x8 is None or (version, scale_version) != (x._version, x8.scale._version):
        with torch.no_grad():
            x8 = _quantize(x.flatten(0, -2), scaling, name, E4M3, rows=True, columns=True)
        _quantized_activations[x] = (x._version, x8.scale._version, x8)
    return x8


def _quantize(
    x_NK: Tensor, scaling: Scaling, name: str, dtype: torch.dtype, rows: bool = False, columns: bool = False
) -> Fp8Tensor:
    x_NK = dense_rows(x_NK)
    ((scale, amax),) = scaling.scale_amax_of(name, measure=partial(quantize_fp8, x_NK))
    return cast_to_fp8(x_NK, scale, dtype, amax=amax, rows=rows, columns=columns)


class _Fp8Linear(torch.autograd.Function):
    """Saves the activation in fp8 for the backward pass; the weight is cast again there, which costs no memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        x8: Fp8Tensor,
        scaling: Scaling,
        names: OperandNames,
        fp8_fast_accum: bool,
    ) -> Tensor:
        # Rounded to the dtype of x first, as where weights are stored so, or are all-gathered so.
        w8 = _quantize(weight_NK.to(x.dtype), scaling, names.weight, E4M3, rows=True)
        ctx.save_for_backward(x8.columns, weight_NK)
        # Scales of one scaling share a version, which changes when another is set: autograd would refuse saved ones.
        ctx.x_scale, ctx.w_scale = x8.scale, w8.scale
        ctx.scaling, ctx.name, ctx.fp8_fast_accum = scaling, names.dy, fp8_fast_accum
        ctx.weight = weight_NK  # the leaf itself: see linear_autograd.py
        out_MN = matmul(x8.rows, w8.rows.T, dtype=x.dtype, scales=(x8.scale, w8.scale), fast=True)
        return out_MN.unflatten(0, x.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x_columns, weight_NK = ctx.saved_tensors
        g8 = _quantize(grad.flatten(0, -2), ctx.scaling, ctx.name, E5M2, rows=True, columns=True)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            w8 = cast_to_fp8(weight_NK.to(grad.dtype), ctx.w_scale, E4M3, columns=True)
            scales = (g8.scale, ctx.w_scale)
            grad_x_MK = matmul(g8.rows, w8.columns.T, dtype=grad.dtype, scales=scales, fast=ctx.fp8_fast_accum)
            grad_x = grad_x_MK.unflatten(0, grad.shape[:-1])
        if ctx.needs_input_grad[1]:
            scales = (g8.scale, ctx.x_scale)
            grad_weight = weight_gradient(ctx.weight, g8.columns, x_columns.T, scales, ctx.fp8_fast_accum)
        return grad_x, grad_weight, None, None, None, None


def fp8_linear(
    x: Tensor, weight_NK: Tensor, scaling: Scaling, names: OperandNames, fp8_fast_accum: bool = False
) -> Tensor:
    """Return x @ weight.T with fp8 operands, in the dtype of x; see `fits_fp8` for the supported shapes.

    The forward pass uses fast accumulation; with `fp8_fast_accum` the backward pass does too.
    """
    return _Fp8Linear.apply(x, weight_NK, activation_to_fp8(x, scaling, names.x), scaling, names, fp8_fast_accum)


def fp8_linear_reference(
    x_MK: Tensor, weight_NK: Tensor, grad_MN: Tensor, scales: tuple[Tensor | None, ...] = (None, None, None)
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and both gradients in plain steps, with explicit rounding instead of fp8 dtypes.

    Scales of x, the weight and the gradient that are not given are those of current scaling.
    """
    x, x_scale = fake_quantize(x_MK, E4M3, scale=scales[0])
    weight, w_scale = fake_quantize(weight_NK.to(x_MK.dtype), E4M3, scale=scales[1])
    grad, g_scale = fake_quantize(grad_MN, E5M2, scale=scales[2])
    out_MN = (x @ weight.T) * (x_scale * w_scale)
    grad_x_MK = (grad @ weight) * (g_scale * w_scale)
    grad_weight_NK = (grad.T @ x) * (g_scale * x_scale)
    return out_MN.to(x_MK.dtype), grad_x_MK.to(grad_MN.dtype), grad_weight_NK.to(weight_NK.dtype)
