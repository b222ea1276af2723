"""Quantization of matrices to fp8 as DeepSeek-V3 trains: a scale per 128 values that a GEMM sums, or per 128 x 128.

    x8 = empty_blockwise(n, k, device, rows=True, columns=True)
    quantize_blockwise_(x_NK, x8)                       # activations, gradients: 1x128, and 128x1 in `columns`
    w8 = empty_blockwise(o, k, device, rows=True, columns=True, square=True)
    quantize_blockwise_(weight_OK, w8, square=True)     # weights: blocks of 128 x 128, the same scales in both layouts

All is e4m3, with scales from the amax of the group itself. `rows` are reduced over channels, `columns`, transposed,
over tokens. A group or block with an infinity or a NaN becomes NaN entirely.

Scales lie in memory as cuBLAS takes them: those of groups with tokens (of columns: channels) contiguous, those of
blocks with the blocks along the sum contiguous, padded with zeros to a multiple of 4.

Shapes: N tokens, K channels, a multiple of 128 (and so is N for a weight); P tokens padded with zeros to a multiple of
128; G groups along the sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import E4M3, GROUP
from llmb.ops.quant.group_quant import amax_to_scale_
from llmb.ops.quant.scaled_fp8 import ScaledFp8

SCALE_MULTIPLE = 4  # of the scales along the sum of a weight's blocks


def grouped_tokens(tokens: int) -> int:
    """Return the tokens of the column-wise layout."""
    return -(-tokens // GROUP) * GROUP


def empty_blockwise(
    n: int, k: int, device: torch.device, *, rows: bool = False, columns: bool = False, square: bool = False
) -> ScaledFp8:
    """Allocate the requested layouts of a matrix and their scales."""
    assert k % GROUP == 0, f"channels in whole groups of {GROUP}, got {k}"
    assert not square or n % GROUP == 0, f"weights in whole blocks of {GROUP}, got {n} rows"
    tokens = grouped_tokens(n)
    return ScaledFp8(
        torch.empty((n, k) if rows else 0, dtype=E4M3, device=device),
        _empty_scales(n, k, device, square) if rows else torch.empty(0, device=device),
        torch.empty((k, tokens) if columns else 0, dtype=E4M3, device=device),
        _empty_scales(k, tokens, device, square) if columns else torch.empty(0, device=device),
    )


def _empty_scales(n: int, k: int, device: torch.device, square: bool) -> Tensor:
    """Allocate the scales of a layout [n, k], reduced over k."""
    if not square:
        return torch.empty(k // GROUP, n, device=device).T
    groups = -(-k // GROUP // SCALE_MULTIPLE) * SCALE_MULTIPLE
    return torch.zeros(n // GROUP, groups, device=device)


@op
def quantize_blockwise_(x_NK: Tensor, out: ScaledFp8, square: bool = False) -> None:
    """Quantize a matrix to the layouts that `out` has, in groups along the sum, or with `square` in blocks."""
    padded_PK = F.pad(x_NK.float(), (0, 0, 0, -len(x_NK) % GROUP))
    if out.rows.numel():
        _quantize(padded_PK[: len(x_NK)], out.rows, out.row_scales, square)
    if out.columns.numel():
        _quantize(padded_PK.T, out.columns, out.column_scales, square)


def _quantize(x_NK: Tensor, values_NK: Tensor, scales: Tensor, square: bool) -> None:
    groups = x_NK.shape[1] // GROUP
    tiles = x_NK.unflatten(1, (groups, GROUP))
    if square:
        amax_BG = tiles.unflatten(0, (-1, GROUP)).abs().amax(dim=(1, 3))
        scales[:, :groups] = amax_to_scale_(amax_BG)
    else:
        scales.copy_(amax_to_scale_(tiles.abs().amax(dim=2)))
    inverse_NG = group_scales(scales, *x_NK.shape).reciprocal()
    largest = torch.finfo(E4M3).max
    values_NK.copy_((tiles * inverse_NG[..., None]).clamp(-largest, largest).flatten(1).to(E4M3))


def group_scales(scales: Tensor, n: int, k: int) -> Tensor:
    """Return the scale of each group of a layout [n, k], [n, groups], whether scales are of groups or of blocks."""
    scales_NG = scales if len(scales) == n else scales.repeat_interleave(GROUP, dim=0)
    return scales_NG[:, : k // GROUP]
