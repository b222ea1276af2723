"""E2M1, the four-bit floating-point numbers of NVFP4 and MXFP4: a sign, two bits of exponent, one of mantissa.

    packed = pack_e2m1(x)           # the nearest values, two a byte, the earlier one in the low half
    x = unpack_e2m1(packed)         # in fp32

The values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign; there are no infinities and no NaN.
"""

from itertools import pairwise

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code; the fourth is the sign
SIGN = 8


def pack_e2m1(x: Tensor) -> Tensor:
    """Return codes [..., K / 2] of the nearest values; ties go to the even code, and larger values saturate."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for number, (below, above) in enumerate(pairwise(MAGNITUDES)):
        middle = (below + above) / 2
        code += magnitude > middle if number % 2 == 0 else magnitude >= middle  # ties go up from an odd code only
    low, high = (code | x.signbit().to(torch.uint8) * SIGN).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the values [..., K] in fp32."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=codes.device)
    return table[codes.int()]
