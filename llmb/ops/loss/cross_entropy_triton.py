"""Triton kernels of the cross-entropy and its gradient: one program goes over one row twice.

In the first pass each group of eight logits keeps its own maximum and sum of exponentials, so that threads communicate
only at the end of the row. The second pass begins with the logits read last, which are likely in the cache: one program
fills an SM, so few rows are processed at once. The next logits are always loaded before the current ones are used.
Exponentials are powers of two, which GPUs compute.

With a vocabulary-parallel head the passes are two kernels. Neither finds logits in the cache, so they take smaller
tiles: several programs share an SM, and one loads while another reduces its row. In the second one every tile is a
program.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 16384, 32  # 16 logits a thread at a time: two loads of 16 bytes in bf16
VOCAB_PARALLEL_TILE, VOCAB_PARALLEL_WARPS = 4096, 8  # as many a thread
GROUP = 8

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # initial maximum: -inf minus itself would be NaN


@triton.jit
def _tanh_and_derivative(x):
    sigmoid = tl.sigmoid(2 * x)
    return 2 * sigmoid - 1, 4 * sigmoid * (1 - sigmoid)


@triton.jit
def _row_max_and_sum(
    logits_ptr, v, V: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, SOFTCAP: tl.constexpr = 0.0
):
    """Return the maximum of a row and the sum of the exponentials of its logits minus that maximum."""
    group_max = tl.full((TILE // GROUP,), LOWEST, tl.float32)
    group_sum = tl.zeros((TILE // GROUP,), tl.float32)
    following = tl.load(logits_ptr + v, mask=v < V, other=float("-inf"))
    for first in range(0, V, TILE):
        x, offset = following.to(tl.float32), first + TILE + v
        following = tl.load(logits_ptr + offset, mask=offset < V, other=float("-inf"))
        if SOFTCAP > 0:
            tanh, _ = _tanh_and_derivative(x * (1.0 / SOFTCAP))
            x = tl.where(first + v < V, SOFTCAP * tanh, float("-inf"))
        new_max = tl.maximum(group_max, tl.max(x, 1))
        rescaled = group_sum * tl.exp2((group_max - new_max) * LOG2_E)
        group_sum = rescaled + tl.sum(tl.exp2((x - new_max[:, None]) * LOG2_E), 1)
        group_max = new_max
    row_max = tl.max(group_max, 0)
    return row_max, tl.sum(group_sum * tl.exp2((group_max - row_max) * LOG2_E), 0)


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
    SOFTCAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    label = tl.load(labels_ptr + row).to(tl.int32)
    v = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if label >= 0:
        label_logit = tl.load(logits_ptr + label).to(tl.float32)
        label_derivative = 1.0
        if SOFTCAP > 0:
            label_tanh, label_derivative = _tanh_and_derivative(label_logit * (1.0 / SOFTCAP))
            label_logit = SOFTCAP * label_tanh
        row_max, row_sum = _row_max_and_sum(logits_ptr, v, V, TILE, GROUP, SOFTCAP)
        tl.store(losses_ptr + row, tl.log(row_sum) + row_max - label_logit)

        size = tl.load(scale) if SCALE_ON_DEVICE else scale
        factor = size / row_sum
        following = tl.load(logits_ptr + LAST + v, mask=LAST + v < V, other=0.0)
        for back in range(0, V, TILE):
            x, offset = following.to(tl.float32), LAST - back + v
            following = tl.load(logits_ptr + offset - TILE, mask=offset >= TILE, other=0.0)
            if SOFTCAP > 0:
                tanh, derivative = _tanh_and_derivative(x * (1.0 / SOFTCAP))
                grad = tl.exp2((SOFTCAP * tanh - row_max) * LOG2_E) * factor * derivative
            else:
                grad = tl.exp2((x - row_max) * LOG2_E) * factor
            tl.store(logits_ptr + offset, grad.to(logits_ptr.dtype.element_ty), mask=offset < V)
        tl.debug_barrier()  # another thread may have written the gradient at the label
        grad = (tl.exp2((label_logit - row_max) * LOG2_E) * factor - size) * label_derivative
        tl.store(logits_ptr + label, grad.to(logits_ptr.dtype.element_ty))
    else:
        tl.store(losses_ptr + row, 0.0)
        for first in range(0, V, TILE):
            tl.store(logits_ptr + first + v, tl.zeros_like(v).to(logits_ptr.dtype.element_ty), mask=first + v < V)


@triton.jit
def _vocab_parallel_logsumexp(
    logits_ptr,
    labels_ptr,
    first_label,
    lse_ptr,
    label_logits_ptr,
    logits_stride,
    V: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    label = tl.load(labels_ptr + row).to(tl.int32) - first_label
    label_logit = tl.load(logits_ptr + label, mask=(label >= 0) & (label < V), other=0.0)
    v = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row_max, row_sum = _row_max_and_sum(logits_ptr, v, V, TILE, GROUP)
    tl.store(lse_ptr + row, tl.log(row_sum) + row_max)
    tl.store(label_logits_ptr + row, label_logit.to(tl.float32))


@triton.jit
def _vocab_parallel_cross_entropy_grad(
    logits_ptr, labels_ptr, first_label, lse_ptr, scale, logits_stride, V: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    logits_ptr += row * logits_stride + v
    label = tl.load(labels_ptr + row).to(tl.int32) - first_label
    x = tl.load(logits_ptr, mask=v < V, other=0.0).to(tl.float32)
    probs = tl.exp2((x - tl.load(lse_ptr + row)) * LOG2_E)
    grad = tl.where(v == label, probs - 1.0, probs) * scale
    tl.store(logits_ptr, grad.to(logits_ptr.dtype.element_ty), mask=v < V)


def cross_entropy_grad_triton_(
    logits_NV: Tensor, labels_N: Tensor, scale: float | Tensor, losses_N: Tensor, softcap: float | None = None
) -> None:
    """Launch the kernel of `cross_entropy.cross_entropy_grad_`."""
    _assert_contiguous(logits_NV, labels_N, losses_N)
    on_device = isinstance(scale, Tensor)
    n, v = logits_NV.shape
    if n:
        _cross_entropy_grad[(n,)](
            logits_NV, labels_N, scale if on_device else float(scale), losses_N, logits_NV.stride(0),
            V=v, TILE=TILE, GROUP=GROUP, LAST=(v - 1) // TILE * TILE, SCALE_ON_DEVICE=on_device,
            SOFTCAP=softcap or 0.0, num_warps=WARPS,
        )  # fmt: skip


def vocab_parallel_logsumexp_triton(
    logits_NV: Tensor, labels_N: Tensor, first: int, lse_N: Tensor, label_logits_N: Tensor
) -> None:
    """Launch the kernel of `cross_entropy.vocab_parallel_logsumexp`."""
    _assert_contiguous(logits_NV, labels_N, lse_N, label_logits_N)
    n, v = logits_NV.shape
    if n:
        _vocab_parallel_logsumexp[(n,)](
            logits_NV, labels_N, first, lse_N, label_logits_N, logits_NV.stride(0),
            V=v, TILE=VOCAB_PARALLEL_TILE, GROUP=GROUP, num_warps=VOCAB_PARALLEL_WARPS,
        )  # fmt: skip


def vocab_parallel_grad_triton_(logits_NV: Tensor, labels_N: Tensor, first: int, lse_N: Tensor, scale: float) -> None:
    """Launch the kernel of `cross_entropy.vocab_parallel_grad_`."""
    _assert_contiguous(logits_NV, labels_N, lse_N)
    n, v = logits_NV.shape
    if n:
        _vocab_parallel_cross_entropy_grad[(n, triton.cdiv(v, VOCAB_PARALLEL_TILE))](
            logits_NV, labels_N, first, lse_N, float(scale), logits_NV.stride(0),
            V=v, TILE=VOCAB_PARALLEL_TILE, num_warps=VOCAB_PARALLEL_WARPS,
        )  # fmt: skip


def _assert_contiguous(logits_NV: Tensor, *vectors_N: Tensor) -> None:
    assert logits_NV.stride(1) == 1, "the vocabulary must be contiguous"
    assert all(vector_N.stride(0) == 1 for vector_N in vectors_N), "a number per row must be contiguous"
