"""Triton kernel that widens fp8 weights with a scale per row in one pass over memory."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program
NUM_WARPS = 8  # 16 bytes of fp8 per thread


@triton.jit
def _widen_channels(values_ptr, scales_ptr, out_ptr, K, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row, k = (program // blocks).to(tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    widened = values * tl.load(scales_ptr + row)
    tl.store(out_ptr + row * K + k, widened.to(out_ptr.dtype.element_ty), mask=k < K)


def widen_channels_triton_(values_MK: Tensor, scales_M: Tensor, out_MK: Tensor) -> None:
    """Launch the kernel of `channel_quant.widen_channels_`."""
    assert values_MK.is_contiguous(), "values must be contiguous"
    assert out_MK.is_contiguous(), "the output must be contiguous"
    m, k = values_MK.shape
    blocks = triton.cdiv(k, BLOCK)
    if m:
        _widen_channels[(m * blocks,)](values_MK, scales_M, out_MK, k, blocks, BLOCK=BLOCK, num_warps=NUM_WARPS)
