"""MXFP4 weights as the OCP Microscaling (MX) specification defines them: e2m1 values, an e8m0 scale per 32 of them.

    quantized = quantize_mxfp4(weight_OK)
    weight_OK = dequantize_mxfp4(quantized)

A scale is a power of two, stored as its exponent + 127: the largest power not above amax, divided by 4, the largest
power of two among the e2m1 values. So values from 6 to 8 times the scale saturate. A scale of 255 is NaN. Published
gpt-oss files hold packed values as NAME_blocks [..., O, G, 16] and scales as NAME_scales [..., O, G].

Shapes: O outputs, K inputs, G = K / 32 groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.quant.e2m1 import pack_e2m1, unpack_e2m1

MXFP4_GROUP = 32  # inputs that share a scale
E8M0_BIAS, E8M0_NAN = 127, 255
E2M1_MAX_EXPONENT = 2  # of 4 and 6


class Mxfp4(NamedTuple):
    """A weight, or a stack of weights."""

    packed: Tensor  # [..., O, K / 2] uint8
    scales: Tensor  # [..., O, G] uint8, e8m0


def quantize_mxfp4(weight_OK: Tensor) -> Mxfp4:
    """Quantize a weight [..., O, K], rounding to nearest; K is a multiple of 32."""
    groups = weight_OK.float().unflatten(-1, (-1, MXFP4_GROUP))
    _, exponent = torch.frexp(groups.abs().amax(dim=-1))  # amax = m * 2**exponent with m from 0.5 to 1
    scales = (exponent - 1 - E2M1_MAX_EXPONENT + E8M0_BIAS).clamp(0, E8M0_NAN - 1).to(torch.uint8)
    return Mxfp4(pack_e2m1(groups / e8m0_value(scales).unsqueeze(-1)).flatten(-2), scales)


def dequantize_mxfp4(quantized: Mxfp4) -> Tensor:
    """Return a weight's values times their scales, in fp32."""
    groups = unpack_e2m1(quantized.packed).unflatten(-1, (-1, MXFP4_GROUP))
    return (groups * e8m0_value(quantized.scales).unsqueeze(-1)).flatten(-2)


def e8m0_value(scales: Tensor) -> Tensor:
    """Return the powers of two of e8m0 scales, in fp32, whose bits of exponent they are."""
    powers = (scales.int() << 23).view(torch.float32)
    return powers.masked_fill(scales == 0, 2.0**-E8M0_BIAS).masked_fill(scales == E8M0_NAN, torch.nan)
