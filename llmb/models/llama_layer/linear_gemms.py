"""The three matrix products of a linear layer, written where they are wanted and added to what is there.

    products.forward(x_NK, weight_MK, out=y_NM)                 # y = x @ weight.T
    products.input_gradient(dy_NM, weight_MK, out=dx_NK)        # dx = dy @ weight
    products.weight_gradient(dy_NM, x_NK, into_MK, fresh)       # into = dy.T @ x, or += where it is not fresh

Shapes: N tokens, K inputs, M outputs.
"""

from torch import Tensor

from llmb.ops.gemm.fp8_linear import Fp8
from llmb.ops.gemm.matmul import multiply


class Products:
    """In the format of the operands; a weight's gradient may be fp32."""

    def forward(self, x_NK: Tensor, weight_MK: Tensor, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        """x @ weight.T, and `onto`, which may be `out`, where there is one."""
        return multiply(x_NK, weight_MK.T, out=out, onto=onto)

    def input_gradient(
        self, dy_NM: Tensor, weight_MK: Tensor, out: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor:
        """dy @ weight, and `onto`, which may be `out`, where there is one."""
        return multiply(dy_NM, weight_MK, out=out, onto=onto)

    def weight_gradient(self, dy_NM: Tensor, x_NK: Tensor, into_MK: Tensor, fresh: bool) -> None:
        """`into` becomes dy.T @ x, or that is added to it."""
        multiply(dy_NM.T, x_NK, out=into_MK, onto=None if fresh else into_MK)


class Fp8Products:
    """The same of operands in 8 bits, each in the form that its product takes (`llmb/ops/quant/fp8_quant.py`).

    Going forward the GPU adds with fewer bits, enough for what is rounded to bf16 next; with `fast_sums` back as well.
    """

    def __init__(self, fast_sums: bool = False):
        self._fast_sums = fast_sums

    def forward(self, x: Fp8, weight: Fp8, out_NM: Tensor, onto: Tensor | None = None) -> Tensor:
        """Takes rows of both."""
        return multiply(x.rows, weight.rows.T, out=out_NM, onto=onto, scales=(x.scale, weight.scale), fast=True)

    def input_gradient(self, dy: Fp8, weight: Fp8, out_NK: Tensor) -> Tensor:
        """Takes rows of the slope and columns of the weight."""
        return multiply(dy.rows, weight.columns.T, out=out_NK, scales=(dy.scale, weight.scale), fast=self._fast_sums)

    def weight_gradient(self, dy: Fp8, x: Fp8, into_MK: Tensor, fresh: bool) -> None:
        """Takes columns of both."""
        scales, onto = (dy.scale, x.scale), None if fresh else into_MK
        multiply(dy.columns, x.columns.T, out=into_MK, onto=onto, scales=scales, fast=self._fast_sums)
