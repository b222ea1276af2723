"""NVFP4 weights as NVIDIA ModelOpt stores them: e2m1 values, an e4m3 scale per 16 of them, an fp32 scale per tensor.

    quantized = quantize_nvfp4(weight_OK)
    weight_OK = dequantize_nvfp4(quantized)

A value is code * scale of its group * scale of the tensor. The scale of the tensor is amax / (6 * 448), so that the
group with the largest value has the largest e4m3 scale; that of a group is its amax / 6 divided by it. (Some libraries
call the inverse, 448 * 6 / amax, the global scale.) Two codes share a byte, the earlier one in the low half. The e2m1
values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign.

Shapes: O outputs, K inputs, G = K / 16 groups.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.quant.activation_quant import E4M3, E4M3_MAX, MIN_AMAX

NVFP4_GROUP = 16  # inputs that share a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code; the fourth is the sign
SIGN = 8


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
    codes = _codes(groups * (scales * scale).reciprocal().unsqueeze(-1)).flatten(-2)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return Nvfp4(low | high << 4, scales.to(E4M3), scale)


def dequantize_nvfp4(quantized: Nvfp4) -> Tensor:
    """Return a weight's values times their scales, in fp32."""
    codes = torch.stack((quantized.packed & 15, quantized.packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=codes.device)
    groups = table[codes.int()].unflatten(-1, (-1, NVFP4_GROUP))
    return (groups * (quantized.scales.float() * quantized.scale).unsqueeze(-1)).flatten(-2)


def _codes(x: Tensor) -> Tensor:
    """Return the code of the nearest value; ties go to the even code, and larger values saturate."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for number, (below, above) in enumerate(pairwise(MAGNITUDES)):
        middle = (below + above) / 2
        code += magnitude > middle if number % 2 == 0 else magnitude >= middle  # ties go up from an odd code only
    return code | x.signbit().to(torch.uint8) * SIGN
