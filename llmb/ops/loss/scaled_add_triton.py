"""Triton for a tensor times a number, added to one of another format: one program takes one stretch."""

import triton
import triton.language as tl
from torch import Tensor

STRETCH = 4096
WARPS = 8  # 16 numbers a thread


@triton.jit
def _scaled_add(total_ptr, part_ptr, scale_ptr, count, FRESH: tl.constexpr, STRETCH: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    inside = place < count
    value = tl.load(part_ptr + place, mask=inside).to(tl.float32) * tl.load(scale_ptr).to(tl.float32)
    if not FRESH:
        value += tl.load(total_ptr + place, mask=inside).to(tl.float32)
    tl.store(total_ptr + place, value.to(total_ptr.dtype.element_ty), mask=inside)


def scaled_add_triton_(total: Tensor, part: Tensor, scale: Tensor, fresh: bool) -> None:
    """As `scaled_add.scaled_add_reference_`."""
    assert all(one.is_contiguous() for one in (total, part)), "numbers lie side by side"
    assert total.shape == part.shape, "number for number"
    if count := total.numel():
        _scaled_add[(triton.cdiv(count, STRETCH),)](
            total, part, scale, count, FRESH=fresh, STRETCH=STRETCH, num_warps=WARPS
        )
