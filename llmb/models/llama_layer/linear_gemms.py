"""The three GEMMs of a linear layer, with output buffers and accumulation.

    gemms.forward(x_NK, weight_MK, out=y_NM)                        # y = x @ weight.T
    gemms.input_gradient(dy_NM, weight_MK, out=dx_NK)               # dx = dy @ weight
    gemms.weight_gradient(dy_NM, x_NK, dweight_MK, accumulate)      # dweight = dy.T @ x, or +=

Shapes: N tokens, K inputs, M outputs.
"""

from torch import Tensor

from llmb.ops.gemm.matmul import matmul
from llmb.ops.gemm.scaled_matmul import scaled_matmul
from llmb.ops.quant.fp8_quant import Fp8Tensor
from llmb.ops.quant.scaled_fp8 import ScaledFp8


class LinearGemms:
    """GEMMs in the dtype of the operands; a weight's gradient may be fp32."""

    def forward(
        self, x_NK: Tensor, weight_MK: Tensor, out: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        """Return x @ weight.T plus `addend`, which may be `out`."""
        return matmul(x_NK, weight_MK.T, out=out, addend=addend)

    def input_gradient(
        self, dy_NM: Tensor, weight_MK: Tensor, out: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        """Return dy @ weight plus `addend`, which may be `out`."""
        return matmul(dy_NM, weight_MK, out=out, addend=addend)

    def weight_gradient(self, dy_NM: Tensor, x_NK: Tensor, dweight_MK: Tensor, accumulate: bool) -> None:
        """Set `dweight` to dy.T @ x, or add to it."""
        matmul(dy_NM.T, x_NK, out=dweight_MK, addend=dweight_MK if accumulate else None)


class Fp8LinearGemms:
    """GEMMs of fp8 operands, each in the memory layout that its GEMM takes (`llmb/ops/quant/fp8_quant.py`).

    The forward pass uses fast accumulation, enough for a result in bf16; with `fp8_fast_accum` the backward pass too.
    """

    def __init__(self, fp8_fast_accum: bool = False):
        self._fp8_fast_accum = fp8_fast_accum

    def forward(self, x: Fp8Tensor, weight: Fp8Tensor, out_NM: Tensor, addend: Tensor | None = None) -> Tensor:
        """Return x @ weight.T plus `addend`; takes rows of both."""
        return matmul(x.rows, weight.rows.T, out=out_NM, addend=addend, scales=(x.scale, weight.scale), fast=True)

    def input_gradient(self, dy: Fp8Tensor, weight: Fp8Tensor, out_NK: Tensor) -> Tensor:
        """Return dy @ weight; takes rows of the gradient and columns of the weight."""
        scales = (dy.scale, weight.scale)
        return matmul(dy.rows, weight.columns.T, out=out_NK, scales=scales, fast=self._fp8_fast_accum)

    def weight_gradient(self, dy: Fp8Tensor, x: Fp8Tensor, dweight_MK: Tensor, accumulate: bool) -> None:
        """Set `dweight` to dy.T @ x, or add to it; takes columns of both."""
        scales, addend = (dy.scale, x.scale), dweight_MK if accumulate else None
        matmul(dy.columns, x.columns.T, out=dweight_MK, addend=addend, scales=scales, fast=self._fp8_fast_accum)


class ScaledLinearGemms:
    """GEMMs of fp8 operands with many scales each; layouts and accumulation as those of `Fp8LinearGemms`."""

    def __init__(self, fp8_fast_accum: bool = False):
        self._fp8_fast_accum = fp8_fast_accum

    def forward(self, x: ScaledFp8, weight: ScaledFp8, out_NM: Tensor, addend: Tensor | None = None) -> Tensor:
        """Return x @ weight.T plus `addend`; takes rows of both."""
        return scaled_matmul((x.rows, x.row_scales), (weight.rows, weight.row_scales), out_NM, addend, fast=True)

    def input_gradient(self, dy: ScaledFp8, weight: ScaledFp8, out_NK: Tensor) -> Tensor:
        """Return dy @ weight; takes rows of the gradient and columns of the weight."""
        right = weight.columns, weight.column_scales
        return scaled_matmul((dy.rows, dy.row_scales), right, out_NK, fast=self._fp8_fast_accum)

    def weight_gradient(self, dy: ScaledFp8, x: ScaledFp8, dweight_MK: Tensor, accumulate: bool) -> None:
        """Set `dweight` to dy.T @ x, or add to it; takes columns of both."""
        left, right = (dy.columns, dy.column_scales), (x.columns, x.column_scales)
        scaled_matmul(left, right, dweight_MK, dweight_MK if accumulate else None, fast=self._fp8_fast_accum)
