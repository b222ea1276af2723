"""Weights in fp8 (e4m3) with one scale per output channel, and their widening for GEMMs in another dtype.

    weight = ChannelFp8(values_MK, scales_M)             # memory: of a parameter bucket
    quantize_channels_(weight_MK, weight)                # when weights are initialised or loaded
    widen_channels_(weight.values, weight.scales, out_MK)

Scales are powers of two, so that widening to bf16 or fp32 rounds nothing: e4m3 has its own exponents, and a finer scale
would only move values within them. A row's amax comes to lie between 224 and 448, the largest number of the format.

Shapes: M output channels (rows), K input channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import E4M3, E4M3_MAX, MIN_AMAX

BLOCK = 1 << 26  # elements quantized at once, which limits temporaries to three such blocks of fp32


class ChannelFp8(NamedTuple):
    """A matrix in fp8: values times the scale of their row."""

    values: Tensor  # [M, K] e4m3
    scales: Tensor  # [M] fp32, powers of two

    def rows(self, rows: slice) -> "ChannelFp8":
        """Return some rows, in the same memory."""
        return ChannelFp8(self.values[rows], self.scales[rows])

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in another dtype."""
        out_MK = torch.empty(self.values.shape, dtype=dtype, device=self.values.device)
        widen_channels_(self.values, self.scales, out_MK)
        return out_MK


def quantize_channels_(weight_MK: Tensor, out: ChannelFp8) -> None:
    """Quantize a matrix on its own device, a block of rows at a time, into memory that may be on another."""
    values_MK, scales_M = tuple(out)
    rows = max(1, BLOCK // weight_MK.shape[1])
    for first in range(0, len(weight_MK), rows):
        block = weight_MK[first : first + rows].float()
        scales = channel_scales(block)
        scales_M[first : first + rows].copy_(scales)
        values_MK[first : first + rows].copy_((block / scales[:, None]).to(E4M3))


def channel_scales(weight_MK: Tensor) -> Tensor:
    """Return the least power of two by which each row fits the format."""
    amax_M = weight_MK.abs().amax(1).float().clamp(min=MIN_AMAX)
    mantissa, exponent = torch.frexp(amax_M / E4M3_MAX)  # a mantissa of 0.5 is a power of two itself
    return torch.ldexp(torch.ones_like(amax_M), exponent - (mantissa == 0.5).to(exponent.dtype))


@op
def widen_channels_(values_MK: Tensor, scales_M: Tensor, out_MK: Tensor) -> None:
    """Write values times scales in the dtype of `out`."""
    out_MK.copy_(values_MK.float() * scales_M[:, None])
