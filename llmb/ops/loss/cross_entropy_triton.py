"""Triton kernel of the cross-entropy and its gradient: one program goes over one row twice.

In the first pass each group of eight logits keeps its own maximum and sum of exponentials, so that threads communicate
only at the end of the row. The second pass begins with the logits read last, which are likely in the cache: one program
fills an SM, so few rows are processed at once. The next logits are always loaded before the current ones are used.
Exponentials are powers of two, which GPUs compute.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 16384, 32  # 16 logits a thread at a time: two loads of 16 bytes in bf16
GROUP = 8

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # initial maximum: -inf minus itself would be NaN


@triton.jit
def _cross_entropy_grad(
    logits_ptr,
    labels_ptr,
    scale,
    losses_ptr,
    logits_stride,
    V: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LAST: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    label = tl.load(labels_ptr + row).to(tl.int32)
    v = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if label >= 0:
        label_logit = tl.load(logits_ptr + label).to(tl.float32)
        group_max = tl.full((TILE // GROUP,), LOWEST, tl.float32)
        group_sum = tl.zeros((TILE // GROUP,), tl.float32)
        following = tl.load(logits_ptr + v, mask=v < V, other=float("-inf"))
        for first in range(0, V, TILE):
            x, offset = following.to(tl.float32), first + TILE + v
            following = tl.load(logits_ptr + offset, mask=offset < V, other=float("-inf"))
            new_max = tl.maximum(group_max, tl.max(x, 1))
            rescaled = group_sum * tl.exp2((group_max - new_max) * LOG2_E)
            group_sum = rescaled + tl.sum(tl.exp2((x - new_max[:, None]) * LOG2_E), 1)
            group_max = new_max
        row_max = tl.max(group_max, 0)
        row_sum = tl.sum(group_sum * tl.exp2((group_max - row_max) * LOG2_E), 0)
        tl.store(losses_ptr + row, tl.log(row_sum) + row_max - label_logit)

        size = tl.load(scale) if SCALE_ON_DEVICE else scale
        factor = size / row_sum
        following = tl.load(logits_ptr + LAST + v, mask=LAST + v < V, other=0.0)
        for back in range(0, V, TILE):
            x, offset = following.to(tl.float32), LAST - back + v
            following = tl.load(logits_ptr + offset - TILE, mask=offset >= TILE, other=0.0)
            grad = tl.exp2((x - row_max) * LOG2_E) * factor
            tl.store(logits_ptr + offset, grad.to(logits_ptr.dtype.element_ty), mask=offset < V)
        tl.debug_barrier()  # another thread may have written the gradient at the label
        grad = tl.exp2((label_logit - row_max) * LOG2_E) * factor - size
        tl.store(logits_ptr + label, grad.to(logits_ptr.dtype.element_ty))
    else:
        tl.store(losses_ptr + row, 0.0)
        for first in range(0, V, TILE):
            tl.store(logits_ptr + first + v, tl.zeros_like(v).to(logits_ptr.dtype.element_ty), mask=first + v < V)


def cross_entropy_grad_triton_(logits_NV: Tensor, labels_N: Tensor, scale: float | Tensor, losses_N: Tensor) -> None:
    """Launch the kernel of `cross_entropy.cross_entropy_grad_`."""
    assert logits_NV.stride(1) == labels_N.stride(0) == losses_N.stride(0) == 1, "the vocabulary must be contiguous"
    on_device = isinstance(scale, Tensor)
    n, v = logits_NV.shape
    if n:
        _cross_entropy_grad[(n,)](
            logits_NV, labels_N, scale if on_device else float(scale), losses_N, logits_NV.stride(0),
            V=v, TILE=TILE, GROUP=GROUP, LAST=(v - 1) // TILE * TILE, SCALE_ON_DEVICE=on_device,
            num_warps=WARPS,
        )  # fmt: skip
