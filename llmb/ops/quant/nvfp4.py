"""NVFP4 weights as NVIDIA ModelOpt stores them: e2m1 values, an e4m3 scale per 16 of them, an fp32 scale per tensor.

    quantized = quantize_nvfp4(weight_OK)
    weight_OK = dequantize_nvfp4(quantized)

A value is code * scale of its group * scale of the tensor. The scale of the tensor is amax / (6 * 448), so that the
group with the largest value has the largest e4m3 scale; that of a group is its amax / 6 divided by it. (Some libraries
call the inverse, 448 * 6 / amax, the global scale.)

Shapes: O outputs, K inputs, G = K / 16 groups.
"""

from typing import NamedTuple

from torch import Tensor

from llmb.ops.quant.activation_quant import E4M3, E4M3_MAX, MIN_AMAX
from llmb.ops.quant.e2m1 import MAGNITUDES, pack_e2m1, unpack_e2m1

NVFP4_GROUP = 16  # inputs that share a scale


class Nvfp4(NamedTuple):
    """A weight, or a stack of weights that share the scale of the tensor."""

    packed: Tensor  # [..., O, K / 2] uint8
    scales: Tensor  # [..., O, G] e4m3
    scale: Tensor  # fp32, a scalar


def quantize_nvfp4(weight_OK: Tensor) -> Nvfp4:
    """Quantize a weight [..., O, K], rounding to nearest; K is a multiple of 16."""
    groups = weight_OK.float().unflatten(-1, (-1, NVFP4_GROUP))
    amax = groups.abs().amax(dim=-1)
    scale = amax.amax().clamp(min=MIN_AMAX) * (1 / (MAGNITUDES[-1] * E4M3_MAX))
    scales = (amax * (1 / MAGNITUDES[-1]) * scale.reciprocal()).clamp(max=E4M3_MAX).to(E4M3).float()
    scales = scales.masked_fill(scales == 0, 1.0)  # a group of zeros, whose scale only needs an inverse
    packed = pack_e2m1(groups * (scales * scale).reciprocal().unsqueeze(-1)).flatten(-2)
    return Nvfp4(packed, scales.to(E4M3), scale)


def dequantize_nvfp4(quantized: Nvfp4) -> Tensor:
    """Return a weight's values times their scales, in fp32."""
    groups = unpack_e2m1(quantized.packed).unflatten(-1, (-1, NVFP4_GROUP))
    return (groups * (quantized.scales.float() * quantized.scale).unsqueeze(-1)).flatten(-2)
