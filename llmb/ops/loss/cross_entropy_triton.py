"""Triton for the loss and its slope: one program goes over one row twice.

On the way there each lane of eight words keeps its own maximum and sum of exponentials, so that threads need each
other only at the end of the row. The way back begins with the words seen last, which the cache is likely to have: one
program fills a multiprocessor, so few rows are under way at once. The next words are always asked for before the last
ones are worked on. Exponentials are powers of two, which GPUs compute.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 16384, 32  # 16 words a thread at a time: two loads of 16 bytes in bf16
LANE = 8

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # what a maximum begins with: -inf less itself would be NaN


@triton.jit
def _cross_entropy_slope(
    logits_ptr,
    labels_ptr,
    scale,
    losses_ptr,
    logits_row,
    V: tl.constexpr,
    TILE: tl.constexpr,
    LANE: tl.constexpr,
    LAST: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_row
    label = tl.load(labels_ptr + row).to(tl.int32)
    v = tl.arange(0, TILE // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    if label >= 0:
        labelled = tl.load(logits_ptr + label).to(tl.float32)
        top = tl.full((TILE // LANE,), LOWEST, tl.float32)
        total = tl.zeros((TILE // LANE,), tl.float32)
        coming = tl.load(logits_ptr + v, mask=v < V, other=float("-inf"))
        for first in range(0, V, TILE):
            x, word = coming.to(tl.float32), first + TILE + v
            coming = tl.load(logits_ptr + word, mask=word < V, other=float("-inf"))
            higher = tl.maximum(top, tl.max(x, 1))
            total = total * tl.exp2((top - higher) * LOG2_E) + tl.sum(tl.exp2((x - higher[:, None]) * LOG2_E), 1)
            top = higher
        highest = tl.max(top, 0)
        whole = tl.sum(total * tl.exp2((top - highest) * LOG2_E), 0)
        tl.store(losses_ptr + row, tl.log(whole) + highest - labelled)

        size = tl.load(scale) if SCALE_ON_DEVICE else scale
        share = size / whole
        coming = tl.load(logits_ptr + LAST + v, mask=LAST + v < V, other=0.0)
        for back in range(0, V, TILE):
            x, word = coming.to(tl.float32), LAST - back + v
            coming = tl.load(logits_ptr + word - TILE, mask=word >= TILE, other=0.0)
            slope = tl.exp2((x - highest) * LOG2_E) * share
            tl.store(logits_ptr + word, slope.to(logits_ptr.dtype.element_ty), mask=word < V)
        tl.debug_barrier()  # the thread that wrote the label's word may be another
        slope = tl.exp2((labelled - highest) * LOG2_E) * share - size
        tl.store(logits_ptr + label, slope.to(logits_ptr.dtype.element_ty))
    else:
        tl.store(losses_ptr + row, 0.0)
        for first in range(0, V, TILE):
            tl.store(logits_ptr + first + v, tl.zeros_like(v).to(logits_ptr.dtype.element_ty), mask=first + v < V)


def cross_entropy_slope_triton_(logits_NV: Tensor, labels_N: Tensor, scale: float | Tensor, losses_N: Tensor) -> None:
    """As `cross_entropy.cross_entropy_slope_reference_`."""
    assert logits_NV.stride(1) == labels_N.stride(0) == losses_N.stride(0) == 1, "words of a row lie side by side"
    on_device = isinstance(scale, Tensor)
    n, v = logits_NV.shape
    if n:
        _cross_entropy_slope[(n,)](
            logits_NV, labels_N, scale if on_device else float(scale), losses_N, logits_NV.stride(0),
            V=v, TILE=TILE, LANE=LANE, LAST=(v - 1) // TILE * TILE, SCALE_ON_DEVICE=on_device,
            num_warps=WARPS,
        )  # fmt: skip
