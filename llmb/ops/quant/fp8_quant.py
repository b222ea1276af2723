"""Quantization of matrices to fp8 with one scale per tensor, row-wise and column-wise, in one pass.

    x8 = quantize_fp8_current_scaling(x_NK, E4M3)
    x8.rows, x8.columns                          # [N, K], and its transpose [K, P]; x is about x8.rows * x8.scale

    scale_amax = ScaleAmax(scale, amax)          # two fp32 scalars on the device (delayed scaling)
    quantize_fp8(x_NK, scale_amax, rows_NK, columns_KP)

A tensor is divided by scale = amax / (largest number of the format) and rounded. Activations and weights are e4m3
(3 bits of mantissa), gradients e5m2 (2 bits, but a wider range). Hopper's fp8 GEMMs reduce only along contiguous
memory: `rows` are reduced over channels, `columns` over tokens.

With delayed scaling (`delayed_scaling.py`) values beyond the range are clamped. NaN stays NaN; an infinity is clamped
too, but amax is infinite from then on, and with the next scale everything becomes NaN. With current scaling a tensor
with an infinity or a NaN gets a scale that is infinite or NaN. Either way a diverged run shows it.

Shapes: N tokens, K channels, P tokens padded with zeros to a multiple of 16, which GEMMs over tokens require.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import MIN_AMAX
from llmb.ops.tensor_layout import dense_rows

E5M2 = torch.float8_e5m2
FP8_ALIGNMENT = 16  # fp8 GEMMs take only dimensions that are multiples of this


class Fp8Tensor(NamedTuple):
    """A matrix [N, K] in fp8: values times scale. A layout that was not requested is an empty tensor."""

    rows: Tensor  # [N, K], contiguous
    columns: Tensor  # [K, P], contiguous: the transpose
    scale: Tensor  # fp32, a scalar on the device

    def split_rows(self, widths: tuple[int, ...]) -> list["Fp8Tensor"]:
        """Return the row-wise layout of consecutive rows."""
        return [self._replace(rows=rows) for rows in self.rows.split(widths)]


class ScaleAmax(NamedTuple):
    """The scale that a tensor is divided by, and its largest magnitude since amax was last zeroed (None: ignored)."""

    scale: Tensor
    amax: Tensor | None


def padded_tokens(tokens: int) -> int:
    """Return the tokens of the column-wise layout."""
    return -(-tokens // FP8_ALIGNMENT) * FP8_ALIGNMENT


def tensor_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a tensor is divided by before it is rounded to `dtype`: a scalar that stays on the device."""
    amax = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
    # A multiplication: CUDA divides by a constant through its inverse, and a CPU must give the same bits.
    return amax.clamp(min=MIN_AMAX) * (1 / torch.finfo(dtype).max)


def quantize_fp8_current_scaling(x_NK: Tensor, dtype: torch.dtype) -> Fp8Tensor:
    """Quantize a matrix to both layouts with the scale of its own amax, which takes a pass of its own."""
    return cast_to_fp8(x_NK, tensor_scale(x_NK, dtype), dtype, rows=True, columns=True)


def cast_to_fp8(
    x_NK: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    amax: Tensor | None = None,
    rows: bool = False,
    columns: bool = False,
) -> Fp8Tensor:
    """Divide a matrix by a known scale and round it to fp8, in the requested layouts; update amax if given."""
    n, k = x_NK.shape
    out = Fp8Tensor(
        torch.empty((n, k) if rows else 0, dtype=dtype, device=x_NK.device),
        torch.empty((k, padded_tokens(n)) if columns else 0, dtype=dtype, device=x_NK.device),
        scale,
    )
    rows_NK, columns_KP = out.rows if rows else None, out.columns if columns else None
    quantize_fp8(dense_rows(x_NK), ScaleAmax(scale, amax), rows_NK, columns_KP)
    return out


@op
def quantize_fp8(
    x_NK: Tensor, scale_amax: ScaleAmax, rows_NK: Tensor | None = None, columns_KP: Tensor | None = None
) -> None:
    """Write x / scale, clamped, to `rows` and, transposed, to `columns`, where given, and update amax."""
    x, tokens = x_NK.float(), len(x_NK)
    if scale_amax.amax is not None and x.numel():
        torch.maximum(scale_amax.amax, x.abs().amax(), out=scale_amax.amax)
    if rows_NK is not None:
        rows_NK.copy_(_to_fp8(x, scale_amax.scale, rows_NK.dtype))
    if columns_KP is not None:
        columns_KP[:, :tokens].copy_(_to_fp8(x, scale_amax.scale, columns_KP.dtype).T)
        columns_KP[:, tokens:] = 0


def fake_quantize(
    x: Tensor, dtype: torch.dtype, dim: int | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x / scale clamped and rounded to the format (ties to even) in fp32 arithmetic alone, and the scale.

    If not given, it is that of the amax: there is one scale, or one for each slice along a dimension.
    """
    limits = torch.finfo(dtype)
    if scale is None:
        amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
        scale = amax.float().clamp(min=MIN_AMAX) * (1 / limits.max)
    values = (x.float() * scale.reciprocal()).clamp(-limits.max, limits.max)
    exponent = (torch.frexp(values).exponent - 1).clamp(min=round(math.log2(limits.smallest_normal)))
    ulp = torch.ldexp(torch.full_like(values, limits.eps), exponent)
    return (values / ulp).round() * ulp, scale


def _to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * scale.reciprocal()).clamp(-largest, largest).to(dtype)
