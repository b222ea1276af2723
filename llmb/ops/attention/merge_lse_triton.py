"""Triton for attention_merge: one program takes a few heads of a few rows, so that both tensors are read in lines."""

import triton
import triton.language as tl
from torch import Tensor

ROWS, HEADS, WARPS = (
    8,
    4,
    4,
)  # 8 log-sum-exps side by side are a sector of memory; 32 numbers a thread at a width of 128


@triton.jit
def _merge(
    out_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    n,
    out_row,
    lse_head,
    other_row,
    other_lse_head,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    m = tl.arange(0, ROWS * HEADS)
    row = tl.program_id(0).to(tl.int64) * ROWS + m // HEADS
    head = tl.program_id(1) * HEADS + m % HEADS
    here = (row < n) & (head < H)
    lse = tl.load(lse_ptr + head * lse_head + row, mask=here, other=0.0)
    other_lse = tl.load(other_lse_ptr + head * other_lse_head + row, mask=here, other=0.0)
    top = tl.maximum(lse, other_lse)
    both = top + tl.log(tl.exp(lse - top) + tl.exp(other_lse - top))
    d = tl.arange(0, WIDE)
    inside = here[:, None] & (d < D)[None, :]
    place = (head * D)[:, None] + d[None, :]
    out = tl.load(out_ptr + (row * out_row)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + (row * other_row)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    merged = out * tl.exp(lse - both)[:, None] + other * tl.exp(other_lse - both)[:, None]
    tl.store(out_ptr + (row * out_row)[:, None] + place, merged.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + head * lse_head + row, both, mask=here)


def merge_triton_(out_NHD: Tensor, lse_HN: Tensor, other_NHD: Tensor, other_lse_HN: Tensor) -> None:
    """As `attention_merge.merge_reference_`."""
    n, h, d = out_NHD.shape
    for heads_NHD in (out_NHD, other_NHD):
        assert heads_NHD.stride()[1:] == (d, 1), "heads of a row lie side by side"
    assert lse_HN.stride(1) == other_lse_HN.stride(1) == 1, "log-sum-exps of a head lie side by side"
    if n:
        _merge[(triton.cdiv(n, ROWS), triton.cdiv(h, HEADS))](
            out_NHD, lse_HN, other_NHD, other_lse_HN, n,
            out_NHD.stride(0), lse_HN.stride(0), other_NHD.stride(0), other_lse_HN.stride(0),
            H=h, D=d, WIDE=triton.next_power_of_2(d), ROWS=ROWS, HEADS=HEADS, num_warps=WARPS,
        )  # fmt: skip
