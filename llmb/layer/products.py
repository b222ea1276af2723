"""The three matrix products of a linear layer, written where they are wanted and added to what is there.

    products.forward(x_NK, weight_MK, out=y_NM)                 # y = x @ weight.T
    products.input_gradient(dy_NM, weight_MK, out=dx_NK)        # dx = dy @ weight
    products.weight_gradient(dy_NM, x_NK, into_MK, fresh)       # into = dy.T @ x, or += where it is not fresh

Gradients are added to by the product itself, which reads and writes them once; those of 8-bit operands are not.

Shapes: N tokens, K inputs, M outputs.
"""

import torch
from torch import Tensor

from llmb.kernels.fp8 import Fp8, product
from llmb.kernels.fused_linear import add_product_, product_as
from llmb.predict.workspace import ADDED_AT_ONCE

TILE = 256  # rows of a gradient that the hardware makes together


class Products:
    """In the format of the operands, summed in fp32 by the hardware; a weight's gradient may be fp32."""

    def forward(self, x_NK: Tensor, weight_MK: Tensor, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        """x @ weight.T, and `onto`, which may be `out`, where there is one.

        Added in a pass of its own: a product that adds is slower on an H200 (612 against 667 TFLOP/s), and torch copies
        what it adds to first.
        """
        return _added(torch.mm(x_NK, weight_MK.T, out=None if onto is out else out), out, onto)

    def input_gradient(
        self, dy_NM: Tensor, weight_MK: Tensor, out: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor:
        """dy @ weight, and `onto`, which is `out`, where there is one."""
        if onto is None:
            return torch.mm(dy_NM, weight_MK, out=out)
        assert onto is out
        return onto.addmm_(dy_NM, weight_MK)

    def weight_gradient(self, dy_NM: Tensor, x_NK: Tensor, into_MK: Tensor, fresh: bool) -> None:
        """`into` becomes dy.T @ x, or that is added to it."""
        if fresh:
            product_as(into_MK.dtype, dy_NM.T, x_NK, out=into_MK)
        else:
            add_product_(into_MK, dy_NM.T, x_NK)


def _added(made: Tensor, out: Tensor | None, onto: Tensor | None) -> Tensor:
    """What was made, in memory of its own where `onto` is `out`, and `onto` where there is one."""
    if onto is None:
        return made
    return onto.add_(made) if onto is out else made.add_(onto)


class Fp8Products:
    """The same of operands in 8 bits, each in the form that its product takes (`llmb/kernels/fp8_forms.py`).

    What they give is added to what is there in a pass of its own: torch has no such product that adds.
    """

    def forward(self, x: Fp8, weight: Fp8, out_NM: Tensor, onto: Tensor | None = None) -> Tensor:
        """Takes rows of both."""
        room, scales = None if onto is out_NM else out_NM, (x.scale, weight.scale)
        return _added(product(x.rows, weight.rows, scales, out_NM.dtype, fast=True, out=room), out_NM, onto)

    def input_gradient(self, dy: Fp8, weight: Fp8, out_NK: Tensor) -> Tensor:
        """Takes rows of the slope and columns of the weight."""
        return product(dy.rows, weight.columns, (dy.scale, weight.scale), out_NK.dtype, out=out_NK)

    def weight_gradient(self, dy: Fp8, x: Fp8, into_MK: Tensor, fresh: bool) -> None:
        """Takes columns of both. What is added is made in parts, so that it needs little memory."""
        scales, (m, k) = (dy.scale, x.scale), into_MK.shape
        if fresh:
            product(dy.columns, x.columns, scales, into_MK.dtype, out=into_MK)
            return
        at_once = max(ADDED_AT_ONCE // k // TILE, 1) * TILE
        for first in range(0, m, at_once):
            rows = slice(first, first + at_once)
            into_MK[rows].add_(product(dy.columns[rows], x.columns, scales, into_MK.dtype))
