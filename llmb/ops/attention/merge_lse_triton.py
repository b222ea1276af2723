"""Triton kernel of `merge_lse`: a program takes a few heads of a few rows, so that all loads are coalesced."""

import triton
import triton.language as tl
from torch import Tensor

# 8 contiguous log-sum-exps are a memory sector; a thread has 32 elements at a head_dim of 128.
ROWS, HEADS, WARPS = 8, 4, 4


@triton.jit
def _merge_attn_states(
    out_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    n,
    out_row_stride,
    lse_head_stride,
    other_row_stride,
    other_lse_head_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    m = tl.arange(0, ROWS * HEADS)
    row = tl.program_id(0).to(tl.int64) * ROWS + m // HEADS
    head = tl.program_id(1) * HEADS + m % HEADS
    valid = (row < n) & (head < H)
    lse = tl.load(lse_ptr + head * lse_head_stride + row, mask=valid, other=0.0)
    other_lse = tl.load(other_lse_ptr + head * other_lse_head_stride + row, mask=valid, other=0.0)
    top = tl.maximum(lse, other_lse)
    merged_lse = top + tl.log(tl.exp(lse - top) + tl.exp(other_lse - top))
    d = tl.arange(0, D_TILE)
    mask = valid[:, None] & (d < D)[None, :]
    offset = (head * D)[:, None] + d[None, :]
    out = tl.load(out_ptr + (row * out_row_stride)[:, None] + offset, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + (row * other_row_stride)[:, None] + offset, mask=mask, other=0.0).to(tl.float32)
    merged = out * tl.exp(lse - merged_lse)[:, None] + other * tl.exp(other_lse - merged_lse)[:, None]
    tl.store(out_ptr + (row * out_row_stride)[:, None] + offset, merged.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + head * lse_head_stride + row, merged_lse, mask=valid)


def merge_attn_states_triton(out_NHD: Tensor, lse_HN: Tensor, other_NHD: Tensor, other_lse_HN: Tensor) -> None:
    """Compute `merge_attn_states`."""
    n, h, d = out_NHD.shape
    for x_NHD in (out_NHD, other_NHD):
        assert x_NHD.stride()[1:] == (d, 1), "heads of a row must be contiguous"
    assert lse_HN.stride(1) == other_lse_HN.stride(1) == 1, "log-sum-exps of a head must be contiguous"
    if n:
        _merge_attn_states[(triton.cdiv(n, ROWS), triton.cdiv(h, HEADS))](
            out_NHD, lse_HN, other_NHD, other_lse_HN, n,
            out_NHD.stride(0), lse_HN.stride(0), other_NHD.stride(0), other_lse_HN.stride(0),
            H=h, D=d, D_TILE=triton.next_power_of_2(d), ROWS=ROWS, HEADS=HEADS, num_warps=WARPS,
        )  # fmt: skip
