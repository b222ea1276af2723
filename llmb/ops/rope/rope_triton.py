"""Triton for rotary positions, in place or not: one program turns several heads of one token."""

import math

import triton
import triton.language as tl
from torch import Tensor

MOST_HEADS = 16  # of one program
PER_THREAD = 8  # numbers of each half: one load of 16 bytes in bf16


@triton.jit
def _rotate_into(
    out_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_row,
    out_head,
    x_row,
    x_head,
    table_row,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    INVERSE: tl.constexpr,
):
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    program = tl.program_id(0)
    row = (program // groups).to(tl.int64)
    head, d = (program % groups) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
    cos = tl.load(cos_ptr + row * table_row + d, mask=d < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * table_row + d, mask=d < HALF, other=0.0)
    if INVERSE:
        sin = -sin
    there = (head < H) & (d < HALF)
    place = x_ptr + row * x_row + head * x_head + d
    first = tl.load(place, mask=there, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=there, other=0.0).to(tl.float32)
    place = out_ptr + row * out_row + head * out_head + d
    tl.store(place, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=there)
    tl.store(place + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=there)


def rotate_into_triton(out_NHD: Tensor, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool) -> None:
    """As `rotation.rotate_into_reference`."""
    assert out_NHD.shape == x_NHD.shape, "every number has its place"
    side_by_side = x_NHD.stride(2) == out_NHD.stride(2) == cos_ND.stride(1) == sin_ND.stride(1) == 1
    assert side_by_side, "numbers of a head lie side by side"
    assert cos_ND.stride(0) == sin_ND.stride(0), "cosines and sines have the same stride"
    n, h, d = x_NHD.shape
    heads = _heads_of_a_program(h)
    wide = triton.next_power_of_2(d // 2)
    if n:
        _rotate_into[(n * triton.cdiv(h, heads),)](
            out_NHD, x_NHD, cos_ND, sin_ND, *out_NHD.stride()[:2], *x_NHD.stride()[:2], cos_ND.stride(0),
            H=h, HALF=d // 2, HEADS=heads, WIDE=wide, INVERSE=inverse,
            num_warps=min(max(heads * wide // (32 * PER_THREAD), 1), 8),
        )  # fmt: skip


def _heads_of_a_program(heads: int) -> int:
    """A power of two that divides them, unless that would be a small one: then some of the last program idle."""
    common = math.gcd(heads, MOST_HEADS)
    return common if common >= 4 else min(triton.next_power_of_2(heads), MOST_HEADS)
