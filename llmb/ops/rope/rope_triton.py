"""Triton kernel of RoPE, in place or not: one program rotates several heads of one token."""

import math

import triton
import triton.language as tl
from torch import Tensor

MAX_HEADS = 16  # of one program
PER_THREAD = 8  # elements of each half: one load of 16 bytes in bf16


@triton.jit
def _apply_rope(
    out_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_row_stride,
    out_head_stride,
    x_row_stride,
    x_head_stride,
    table_stride,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INVERSE: tl.constexpr,
):
    head_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    program = tl.program_id(0)
    row = (program // head_blocks).to(tl.int64)
    head, d = (program % head_blocks) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    cos = tl.load(cos_ptr + row * table_stride + d, mask=d < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * table_stride + d, mask=d < HALF, other=0.0)
    if INVERSE:
        sin = -sin
    mask = (head < H) & (d < HALF)
    pointers = x_ptr + row * x_row_stride + head * x_head_stride + d
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    pointers = out_ptr + row * out_row_stride + head * out_head_stride + d
    tl.store(pointers, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(pointers + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


def apply_rope_out_triton(
    out_NHD: Tensor, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False
) -> None:
    """Launch the kernel of `rope.apply_rope_out`."""
    assert out_NHD.shape == x_NHD.shape, "out must have the shape of x"
    contiguous = x_NHD.stride(2) == out_NHD.stride(2) == cos_ND.stride(1) == sin_ND.stride(1) == 1
    assert contiguous, "channels of a head must be contiguous"
    assert cos_ND.stride(0) == sin_ND.stride(0), "cosines and sines must have the same stride"
    n, h, d = x_NHD.shape
    heads = _heads_per_program(h)
    block_d = triton.next_power_of_2(d // 2)
    if n:
        _apply_rope[(n * triton.cdiv(h, heads),)](
            out_NHD, x_NHD, cos_ND, sin_ND, *out_NHD.stride()[:2], *x_NHD.stride()[:2], cos_ND.stride(0),
            H=h, HALF=d // 2, HEADS=heads, BLOCK_D=block_d, INVERSE=inverse,
            num_warps=min(max(heads * block_d // (32 * PER_THREAD), 1), 8),
        )  # fmt: skip


def _heads_per_program(heads: int) -> int:
    """Return a power of two that divides the heads, or, if that is small, one with which the last program idles."""
    common = math.gcd(heads, MAX_HEADS)
    return common if common >= 4 else min(triton.next_power_of_2(heads), MAX_HEADS)
