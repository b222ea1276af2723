"""E2M1, the four-bit floating-point numbers of NVFP4 and MXFP4: a sign, two bits of exponent, one of mantissa.

    packed = pack_e2m1(x)           # the nearest values, two a byte, the earlier one in the low half
    x = unpack_e2m1(packed)         # in fp32
    swizzled = swizzle_e2m1(packed) # the order in which kernels take them; unswizzle_e2m1 is its inverse

Tensor cores take pairs of neighbouring inputs from a register: of 32, thread t of four holds inputs 8 i + 2 t and
8 i + 2 t + 1 for i from 0 to 3. So after the swizzle word t of each four (32 bits) holds these eight codes: pair i has
its first code in bits 4 i and up, its second one 16 bits above, as a register holds two bf16 numbers.

The values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign; there are no infinities and no NaN.
"""

from itertools import pairwise

import torch
from torch import Tensor

SWIZZLE_GROUP = 32  # values that are reordered among themselves
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code; the fourth is the sign
SIGN = 8


def pack_e2m1(x: Tensor) -> Tensor:
    """Return codes [..., K / 2] of the nearest values; ties go to the even code, and larger values saturate."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for number, (below, above) in enumerate(pairwise(MAGNITUDES)):
        middle = (below + above) / 2
        code += magnitude > middle if number % 2 == 0 else magnitude >= middle  # ties go up from an odd code only
    return _pack_codes(code | x.signbit().to(torch.uint8) * SIGN)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the values [..., K] in fp32."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=packed.device)
    return table[_codes(packed).int()]


def swizzle_e2m1(packed: Tensor) -> Tensor:
    """Reorder codes [..., K / 2] as kernels take them; K is a multiple of SWIZZLE_GROUP."""
    codes = _codes(packed).unflatten(-1, (-1, 4, 4, 2))  # i, t and member of the pair
    return _pack_codes(codes.movedim(-3, -1).flatten(-4))


def unswizzle_e2m1(swizzled: Tensor) -> Tensor:
    """Return codes [..., K / 2] in the order of the values."""
    codes = _codes(swizzled).unflatten(-1, (-1, 4, 2, 4))  # t, member of the pair and i
    return _pack_codes(codes.movedim(-1, -3).flatten(-4))


def _codes(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _pack_codes(codes: Tensor) -> Tensor:
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4
