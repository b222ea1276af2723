"""The three matrix products of a linear layer, written where they are wanted and added to what is there.

    products.forward(x_NK, weight_MK, out=y_NM)                 # y = x @ weight.T
    products.input_gradient(dy_NM, weight_MK, out=dx_NK)        # dx = dy @ weight
    products.weight_gradient(dy_NM, x_NK, into_MK, fresh)       # into = dy.T @ x, or += where it is not fresh

Gradients are added to by the product itself, which reads and writes them once. Shapes: N tokens, K inputs, M outputs.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from llmb.kernels.forms import E4M3
from llmb.kernels.fp8 import E5M2, cast, fits_fp8, product, scale_of


class Products:
    """In the format of the operands, summed in fp32 by the hardware; a weight's gradient may be fp32."""

    def forward(self, x_NK: Tensor, weight_MK: Tensor, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        """x @ weight.T, and `onto`, which may be `out`, where there is one."""
        return _product(x_NK, weight_MK.T, out, onto)

    def project(self, x_NK: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """One input through several weights."""
        for weight_MK, out in zip(weights, outs, strict=True):
            self.forward(x_NK, weight_MK, out)

    def input_gradient(
        self, dy_NM: Tensor, weight_MK: Tensor, out: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor:
        """dy @ weight, and `onto` where there is one."""
        return _product(dy_NM, weight_MK, out, onto)

    def weight_gradient(self, dy_NM: Tensor, x_NK: Tensor, into_MK: Tensor, fresh: bool) -> None:
        """`into` becomes dy.T @ x, or that is added to it."""
        if into_MK.dtype != dy_NM.dtype:
            _wide_weight_gradient(dy_NM, x_NK, into_MK, fresh)
        elif fresh:
            torch.mm(dy_NM.T, x_NK, out=into_MK)
        else:
            into_MK.addmm_(dy_NM.T, x_NK)


def _product(left: Tensor, right: Tensor, out: Tensor | None, onto: Tensor | None) -> Tensor:
    if onto is None:
        return torch.mm(left, right, out=out)
    if onto is out:
        return onto.addmm_(left, right)
    return torch.addmm(onto, left, right, out=out)


def _wide_weight_gradient(dy_NM: Tensor, x_NK: Tensor, into_MK: Tensor, fresh: bool) -> None:
    """Operands of 16 bits into a gradient of fp32."""
    wide = into_MK.dtype
    if not into_MK.is_cuda:
        into_MK.addmm_(dy_NM.T.to(wide), x_NK.to(wide), beta=0 if fresh else 1)
    elif fresh:
        torch.mm(dy_NM.T, x_NK, out_dtype=wide, out=into_MK)
    elif _adds_to_fp32(into_MK.device):
        torch.addmm(into_MK, dy_NM.T, x_NK, out_dtype=wide, out=into_MK)
    else:
        into_MK.add_(torch.mm(dy_NM.T, x_NK, out_dtype=wide))


@cache
def _adds_to_fp32(device: torch.device) -> bool:
    """Whether this torch adds a product of bf16 to fp32 in one step; the first that had the call wanted bf16 there."""
    sum_fp32, bf16 = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
    try:
        torch.addmm(sum_fp32, bf16, bf16, out_dtype=torch.float32, out=sum_fp32)
    except RuntimeError:
        return False
    return True


class Fp8Products(Products):
    """With 8-bit operands, one scale a tensor, wherever the sizes allow (`llmb/kernels/fp8.py`)."""

    def forward(self, x_NK: Tensor, weight_MK: Tensor, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        if not _fits(x_NK, weight_MK):
            return super().forward(x_NK, weight_MK, out, onto)
        made = torch.empty(len(x_NK), len(weight_MK), dtype=x_NK.dtype, device=x_NK.device) if out is None else out
        self._forward(x_NK, (weight_MK,), (made,), onto)
        return made

    def project(self, x_NK: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """The input is rounded once."""
        if all(_fits(x_NK, weight_MK) for weight_MK in weights):
            self._forward(x_NK, weights, outs, None)
        else:
            super().project(x_NK, weights, outs)

    def _forward(self, x_NK: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor], onto: Tensor | None) -> None:
        x8 = cast(x_NK, scale_of(x_NK, E4M3), E4M3, rows=True)
        for weight_MK, out in zip(weights, outs, strict=True):
            w8 = cast(weight_MK, scale_of(weight_MK, E4M3), E4M3, rows=True)
            _put(product(x8.rows, w8.rows, (x8.scale, w8.scale), x_NK.dtype, fast=True), out, onto)

    def input_gradient(
        self, dy_NM: Tensor, weight_MK: Tensor, out: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor:
        if not fits_fp8(len(dy_NM), *reversed(weight_MK.shape)):
            return super().input_gradient(dy_NM, weight_MK, out, onto)
        g8 = cast(dy_NM, scale_of(dy_NM, E5M2), E5M2, rows=True)
        w8 = cast(weight_MK, scale_of(weight_MK, E4M3), E4M3, columns=True)
        made = product(g8.rows, w8.columns, (g8.scale, w8.scale), dy_NM.dtype)
        return made if out is None and onto is None else _put(made, made if out is None else out, onto)

    def weight_gradient(self, dy_NM: Tensor, x_NK: Tensor, into_MK: Tensor, fresh: bool) -> None:
        if not _fits(x_NK, into_MK):
            return super().weight_gradient(dy_NM, x_NK, into_MK, fresh)
        g8 = cast(dy_NM, scale_of(dy_NM, E5M2), E5M2, columns=True)
        x8 = cast(x_NK, scale_of(x_NK, E4M3), E4M3, columns=True)
        made = product(g8.columns, x8.columns, (g8.scale, x8.scale), into_MK.dtype)
        _put(made, into_MK, None if fresh else into_MK)


def _fits(x_NK: Tensor, weight_MK: Tensor) -> bool:
    return fits_fp8(len(x_NK), x_NK.shape[1], len(weight_MK))


def _put(made: Tensor, out: Tensor, onto: Tensor | None) -> Tensor:
    return out.copy_(made) if onto is None else torch.add(onto, made, out=out)
