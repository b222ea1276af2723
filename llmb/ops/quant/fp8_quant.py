"""A matrix in 8 bits, in both forms that products take, made in one pass with a scale that is known beforehand.

    gauge = Gauge(scale, amax)                      # two fp32 numbers on the device
    cast_both(x_NK, gauge, rows_NK, columns_KP)     # x / scale, and its transpose; amax has seen x

Hopper's products sum 8-bit numbers only along memory: `rows` are summed over channels, `columns` over tokens. A form
that is None is left out; without both, only the largest magnitude is found. The scale comes from what the same tensor
was before (`delayed_scaling.py`), so what has grown beyond the range is clamped. NaN stays NaN; an infinity is clamped too,
but amax is infinite from then on, and with the next scale everything becomes NaN: a run that has diverged shows it.

Shapes: N tokens, K channels, P tokens with zeros up to the next multiple of 16, which products over tokens want.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton
from llmb.ops.gemm.fp8_linear import MULTIPLE, Fp8, scale_of


class Gauge(NamedTuple):
    """Of one tensor: what it is divided by, and the largest magnitude that it has had since this was last 0."""

    scale: Tensor
    amax: Tensor


def padded(tokens: int) -> int:
    """Tokens of the form `columns`."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def in_both_forms(x_NK: Tensor, dtype: torch.dtype) -> Fp8:
    """A matrix with the scale that fits it, which takes a pass of its own."""
    (n, k), device = x_NK.shape, x_NK.device
    made = Fp8(
        torch.empty(n, k, dtype=dtype, device=device),
        torch.empty(k, padded(n), dtype=dtype, device=device),
        scale_of(x_NK, dtype),
    )
    cast_both(x_NK, Gauge(made.scale, torch.zeros_like(made.scale)), made.rows, made.columns)
    return made


def cast_both(x_NK: Tensor, gauge: Gauge, rows_NK: Tensor | None = None, columns_KP: Tensor | None = None) -> None:
    """A matrix of wider numbers in 8 bits."""
    if takes_triton(x_NK):
        from llmb.ops.quant.fp8_quant_triton import cast_both_triton

        cast_both_triton(x_NK, gauge, rows_NK, columns_KP)
    else:
        cast_both_reference(x_NK, gauge, rows_NK, columns_KP)


def cast_both_reference(
    x_NK: Tensor, gauge: Gauge, rows_NK: Tensor | None = None, columns_KP: Tensor | None = None
) -> None:
    """The same in plain torch."""
    x, tokens = x_NK.float(), len(x_NK)
    if x.numel():
        torch.maximum(gauge.amax, x.abs().amax(), out=gauge.amax)
    if rows_NK is not None:
        rows_NK.copy_(_eight_bits(x, gauge.scale, rows_NK.dtype))
    if columns_KP is not None:
        columns_KP[:, :tokens].copy_(_eight_bits(x, gauge.scale, columns_KP.dtype).T)
        columns_KP[:, tokens:] = 0


def _eight_bits(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * scale.reciprocal()).clamp(-largest, largest).to(dtype)
