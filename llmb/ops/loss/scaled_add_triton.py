"""Triton kernel of the scaled add: one program takes one block."""

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

BLOCK = 4096
WARPS = 8  # 16 elements a thread


@triton.jit
def _scaled_add(total_ptr, x_ptr, scale_ptr, count, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    value = tl.load(x_ptr + i, mask=mask).to(tl.float32)
    if scale_ptr is not None:
        value *= tl.load(scale_ptr).to(tl.float32)
    if ACCUMULATE:
        value += tl.load(total_ptr + i, mask=mask).to(tl.float32)
    tl.store(total_ptr + i, value.to(total_ptr.dtype.element_ty), mask=mask)


def scaled_add_triton_(total: Tensor, x: Tensor, scale: Tensor | None, accumulate: bool) -> None:
    """Launch the kernel of `scaled_add.scaled_add_`."""
    assert total.is_contiguous(), "total must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    assert total.shape == x.shape, "total and x must have one shape"
    if count := total.numel():
        _scaled_add[(triton.cdiv(count, BLOCK),)](
            total, x, scale, count, ACCUMULATE=accumulate, BLOCK=BLOCK, num_warps=WARPS
        )
    increment_version(total)  # as torch's in-place ops do, so that autograd notices
