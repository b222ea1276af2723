"""Triton kernels of RoPE: one program rotates several heads of one token, in place or not."""

import math

import triton
import triton.language as tl
from torch import Tensor

MAX_HEADS = 16  # of one program
PER_THREAD = 8  # elements of each half: one load of 16 bytes in bf16


@triton.jit
def _rotate_heads(
    out_ptr, x_ptr, cos_ptr, sin_ptr, out_head_stride, x_head_stride, block,
    H: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, ANGLE: tl.constexpr,
):  # fmt: skip
    """Write a block of a token's heads, rotated by ANGLE times the angle of the tables: 1, -1, or 0 for a copy."""
    head, d = block * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    d = tl.broadcast_to(d, (HEADS, BLOCK_D))  # each thread loads its own angles: no exchange through shared memory
    mask = (head < H) & (d < HALF)
    pointers = x_ptr + head * x_head_stride + d
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    if ANGLE != 0:
        cos = tl.load(cos_ptr + d, mask=d < HALF, other=0.0)
        sin = tl.load(sin_ptr + d, mask=d < HALF, other=0.0) * ANGLE
        first, second = first * cos - second * sin, second * cos + first * sin
    pointers = out_ptr + head * out_head_stride + d
    tl.store(pointers, first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(pointers + HALF, second.to(out_ptr.dtype.element_ty), mask=mask)


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
    ANGLE: tl.constexpr,
):
    blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    _rotate_heads(
        out_ptr + row * out_row_stride, x_ptr + row * x_row_stride, cos_ptr + row * table_stride,
        sin_ptr + row * table_stride, out_head_stride, x_head_stride, tl.program_id(0) % blocks,
        H, HALF, HEADS, BLOCK_D, ANGLE,
    )  # fmt: skip


@triton.jit
def _qkv_rope_backward(
    dqkv_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    cos_ptr,
    sin_ptr,
    dqkv_row_stride,
    dq_row_stride,
    dq_head_stride,
    dk_row_stride,
    dk_head_stride,
    dv_row_stride,
    dv_head_stride,
    table_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ANGLE: tl.constexpr,
):
    """Programs of a token: those of its queries, then of its keys, then of its values."""
    q_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (G + HEADS - 1) // HEADS
    blocks: tl.constexpr = q_blocks + 2 * kv_blocks
    D: tl.constexpr = 2 * HALF
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    out_ptr = dqkv_ptr + row * dqkv_row_stride
    cos_ptr += row * table_stride
    sin_ptr += row * table_stride
    if block < q_blocks:
        _rotate_heads(
            out_ptr, dq_ptr + row * dq_row_stride, cos_ptr, sin_ptr, D, dq_head_stride, block,
            H, HALF, HEADS, BLOCK_D, ANGLE,
        )  # fmt: skip
    elif block < q_blocks + kv_blocks:
        _rotate_heads(
            out_ptr + H * D, dk_ptr + row * dk_row_stride, cos_ptr, sin_ptr, D, dk_head_stride, block - q_blocks,
            G, HALF, HEADS, BLOCK_D, ANGLE,
        )  # fmt: skip
    else:
        _rotate_heads(
            out_ptr + (H + G) * D, dv_ptr + row * dv_row_stride, cos_ptr, sin_ptr, D, dv_head_stride,
            block - q_blocks - kv_blocks, G, HALF, HEADS, BLOCK_D, 0,
        )  # fmt: skip


def apply_rope_out_triton(
    out_NHD: Tensor, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False
) -> None:
    """Launch the kernel of `rope.apply_rope_out`."""
    assert out_NHD.shape == x_NHD.shape, "out must have the shape of x"
    contiguous = x_NHD.stride(2) == out_NHD.stride(2) == cos_ND.stride(1) == sin_ND.stride(1) == 1
    assert contiguous, "channels of a head must be contiguous"
    assert cos_ND.stride(0) == sin_ND.stride(0), "cosines and sines must have the same stride"
    n, h, d = x_NHD.shape
    heads, block_d = _heads_per_program(h), triton.next_power_of_2(d // 2)
    if n:
        _apply_rope[(n * triton.cdiv(h, heads),)](
            out_NHD, x_NHD, cos_ND, sin_ND, *out_NHD.stride()[:2], *x_NHD.stride()[:2], cos_ND.stride(0),
            H=h, HALF=d // 2, HEADS=heads, BLOCK_D=block_d, ANGLE=-1 if inverse else 1,
            num_warps=_warps(heads, block_d),
        )  # fmt: skip


def qkv_rope_backward_triton(
    dqkv_NX: Tensor, dq_NHD: Tensor, dk_NGD: Tensor, dv_NGD: Tensor, cos_ND: Tensor | None, sin_ND: Tensor | None
) -> None:
    """Launch the kernel of `rope.qkv_rope_backward`."""
    (n, h, d), g = dq_NHD.shape, dk_NGD.shape[1]
    assert dk_NGD.shape == dv_NGD.shape == (n, g, d), "keys and values must have the same heads, as wide as queries"
    assert dqkv_NX.shape == (n, (h + 2 * g) * d), "dqkv must have the columns of all three"
    has_rope = cos_ND is not None
    cos, sin = (dqkv_NX if table is None else table for table in (cos_ND, sin_ND))  # without RoPE they are not read
    assert {x.stride(-1) for x in (dqkv_NX, dq_NHD, dk_NGD, dv_NGD, cos, sin)} == {1}, "channels must be contiguous"
    assert cos.stride(0) == sin.stride(0), "cosines and sines must have the same stride"
    heads, block_d = _heads_per_program(h, g), triton.next_power_of_2(d // 2)
    if n:
        _qkv_rope_backward[(n * (triton.cdiv(h, heads) + 2 * triton.cdiv(g, heads)),)](
            dqkv_NX, dq_NHD, dk_NGD, dv_NGD, cos, sin, dqkv_NX.stride(0), *dq_NHD.stride()[:2], *dk_NGD.stride()[:2],
            *dv_NGD.stride()[:2], cos.stride(0), H=h, G=g, HALF=d // 2, HEADS=heads, BLOCK_D=block_d,
            ANGLE=-1 if has_rope else 0, num_warps=_warps(heads, block_d),
        )  # fmt: skip


def _heads_per_program(*heads: int) -> int:
    """Return a power of two that divides all heads, or, if that is small, one with which the last program idles."""
    common = math.gcd(*heads, MAX_HEADS)
    return common if common >= 4 else min(triton.next_power_of_2(max(heads)), MAX_HEADS)


def _warps(heads: int, block_d: int) -> int:
    return min(max(heads * block_d // (32 * PER_THREAD), 1), 8)
