"""Weights in 4 bits as NVIDIA's ModelOpt stores them: e2m1 numbers, a scale in e4m3 for each 16, one in fp32 for all.

    stored = in_nvfp4(weight_OK)
    weight_OK = from_nvfp4(stored)

A number is code * scale of its group * scale of the tensor. The scale of the tensor is amax / (6 * 448), so that the
group with the largest number has the largest scale that e4m3 holds; that of a group is its own amax / 6 in units of it.
(Some libraries call the inverse, 448 * 6 / amax, the global scale.) Two codes share a byte, the earlier one in the low
half. The e2m1 numbers are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign.

Shapes: O outputs, K inputs, G = K / 16 groups.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.quant.activation_quant import E4M3, LARGEST, SMALLEST_AMAX

NVFP4_GROUP = 16  # inputs that share a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code; the fourth is the sign
SIGN = 8


class Nvfp4(NamedTuple):
    """A weight, or a stack of them that share the scale of the tensor."""

    packed: Tensor  # [..., O, K / 2] uint8
    scales: Tensor  # [..., O, G] e4m3
    scale: Tensor  # fp32, a scalar


def in_nvfp4(weight_OK: Tensor) -> Nvfp4:
    """A weight [..., O, K] rounded to the nearest numbers of the format; K is a multiple of 16."""
    groups = weight_OK.float().unflatten(-1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(dim=-1)
    scale = largest.amax().clamp(min=SMALLEST_AMAX) * (1 / (MAGNITUDES[-1] * LARGEST))
    scales = (largest * (1 / MAGNITUDES[-1]) * scale.reciprocal()).clamp(max=LARGEST).to(E4M3).float()
    scales = scales.masked_fill(scales == 0, 1.0)  # a group of zeros, whose scale must only have an inverse
    codes = _codes(groups * (scales * scale).reciprocal().unsqueeze(-1)).flatten(-2)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return Nvfp4(low | high << 4, scales.to(E4M3), scale)


def from_nvfp4(stored: Nvfp4) -> Tensor:
    """The numbers that a weight stands for, in fp32."""
    codes = torch.stack((stored.packed & 15, stored.packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=codes.device)
    groups = table[codes.int()].unflatten(-1, (-1, NVFP4_GROUP))
    return (groups * (stored.scales.float() * stored.scale).unsqueeze(-1)).flatten(-2)


def _codes(x: Tensor) -> Tensor:
    """The nearest number's code; half-way it is the even one, and what is too large is the largest."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for number, (below, above) in enumerate(pairwise(MAGNITUDES)):
        middle = (below + above) / 2
        code += size > middle if number % 2 == 0 else size >= middle  # half-way goes up from an odd code only
    return code | x.signbit().to(torch.uint8) * SIGN
