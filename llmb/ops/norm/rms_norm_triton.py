"""Triton kernels of RMSNorm and its backward.

Forward, one program takes one row. Backward, as many programs as the GPU runs at once loop over all rows: each sums the
gradient of the weights in registers and prefetches its next rows while it works on the current ones. A second small
kernel adds up the partial sums of the programs, in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.device_capabilities import capabilities

PER_THREAD = 16  # elements of a row in the forward: two loads of 16 bytes in bf16
BACKWARD_BLOCK = 2048  # elements of one program at least: one long row, or several short ones
BACKWARD_PER_THREAD = 16
WARPS_PER_SM = 16  # two programs of 4,096 channels each
SHARED_MEMORY_BYTES = 3 << 16  # of an SM: the current rows and the prefetched ones
MAX_STAGES = 4
SUM_CHANNELS = 32  # weights of one program that adds up: a full cache line of each partial sum


@triton.jit
def load_row(x_ptr, x_stride, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """The program's row in fp32."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    return tl.load(x_ptr + row * x_stride + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def inverse_rms(x, eps, C: tl.constexpr):
    """1 / rms of a row in fp32."""
    return tl.rsqrt(tl.sum(x * x) / C + eps)


@triton.jit
def _rms_norm(
    x_ptr, weight_ptr, out_ptr, addend_ptr, x_stride, out_stride, addend_stride, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    mask = c < C
    x = load_row(x_ptr, x_stride, C, BLOCK_C)
    weight = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    normed = x * inverse_rms(x, eps, C) * weight
    if HAS_ADDEND:
        normed += load_row(addend_ptr, addend_stride, C, BLOCK_C)
    tl.store(out_ptr + row * out_stride + c, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    d_residual_ptr,
    out_ptr,
    partials_ptr,
    dy_stride,
    x_stride,
    d_residual_stride,
    out_stride,
    n,
    eps,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    c = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0)[None, :]
    dweight = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS, num_stages=STAGES):
        x = _load_rows(x_ptr, x_stride, first, n, C, BLOCK_C, ROWS).to(tl.float32)
        dy = _load_rows(dy_ptr, dy_stride, first, n, C, BLOCK_C, ROWS).to(tl.float32)
        if HAS_RESIDUAL:
            d_residual = _load_rows(d_residual_ptr, d_residual_stride, first, n, C, BLOCK_C, ROWS).to(tl.float32)
        dnormed = dy * weight.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
        mean = (tl.sum(dnormed * x, 1) / C)[:, None] * inverse
        normed = x * inverse
        if HAS_DWEIGHT:
            dweight += dy * normed
        dx = inverse * (dnormed - normed * mean)
        if HAS_RESIDUAL:
            dx += d_residual
        offsets, mask = _row_offsets(out_stride, first, n, C, BLOCK_C, ROWS)
        tl.store(out_ptr + offsets, dx.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_DWEIGHT:
        tl.store(partials_ptr + tl.program_id(0) * C + c, tl.sum(dweight, 0), mask=c < C)


@triton.jit
def _load_rows(ptr, stride, first, n, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows from `first` on, in the dtype they have; zeros beyond the last."""
    offsets, mask = _row_offsets(stride, first, n, C, BLOCK_C, ROWS)
    return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def _row_offsets(stride, first, n, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    return tl.cast(first, tl.int64) * stride + (r * stride + c), (first + r < n) & (c < C)


@triton.jit
def _sum_partials(
    partials_ptr,
    sum_ptr,
    partials,
    C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.arange(0, BLOCK_P)[:, None]
    partial = tl.load(partials_ptr + p * C + c[None, :], mask=(p < partials) & (c < C)[None, :], other=0.0)
    total = tl.sum(partial, 0)
    if ACCUMULATE:
        total += tl.load(sum_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(sum_ptr + c, total.to(sum_ptr.dtype.element_ty), mask=c < C)


def warps_per_row(block_c: int) -> int:
    """Warps of a program that holds one row."""
    return min(max(block_c // (32 * PER_THREAD), 1), 16)


def rms_norm_triton(
    x_NC: Tensor, weight_C: Tensor, eps: float, out: Tensor | None = None, addend_NC: Tensor | None = None
) -> Tensor:
    """Launch the kernel of `rms_norm.rms_norm`."""
    out_NC = torch.empty(x_NC.shape, dtype=x_NC.dtype, device=x_NC.device) if out is None else out
    addend = x_NC if addend_NC is None else addend_NC
    assert x_NC.stride(1) == out_NC.stride(1) == addend.stride(1) == 1, "channels must be contiguous"
    n, c = x_NC.shape
    block_c = triton.next_power_of_2(c)
    if n:
        _rms_norm[(n,)](
            x_NC, weight_C, out_NC, addend, x_NC.stride(0), out_NC.stride(0), addend.stride(0), eps,
            C=c, BLOCK_C=block_c, HAS_ADDEND=addend_NC is not None, num_warps=warps_per_row(block_c),
        )  # fmt: skip
    return out_NC


def rms_norm_backward_triton(
    dy_NC: Tensor,
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    d_residual_NC: Tensor | None,
    out_NC: Tensor,
    dweight_C: Tensor | None,
    accumulate: bool,
) -> None:
    """Launch the kernels of `rms_norm.rms_norm_backward`."""
    residual = dy_NC if d_residual_NC is None else d_residual_NC
    assert {x.stride(1) for x in (dy_NC, x_NC, residual, out_NC)} == {1}, "channels must be contiguous"
    n, c = x_NC.shape
    block_c = triton.next_power_of_2(c)
    rows = max(BACKWARD_BLOCK // block_c, 1)
    warps = min(max(block_c, BACKWARD_BLOCK) // (32 * BACKWARD_PER_THREAD), WARPS_PER_SM)
    programs_per_sm = WARPS_PER_SM // warps
    gpu = capabilities(x_NC.device)
    programs = min(triton.cdiv(n, rows), gpu.sms * programs_per_sm)
    stage_bytes = 3 * rows * block_c * x_NC.element_size()
    shared_bytes = min(SHARED_MEMORY_BYTES, gpu.shared_memory_bytes or SHARED_MEMORY_BYTES)
    stages = min(max(shared_bytes // programs_per_sm // stage_bytes, 1), MAX_STAGES)
    has_dweight = dweight_C is not None
    partials_PC = torch.empty(programs if has_dweight else 0, c, dtype=torch.float32, device=x_NC.device)
    if n:
        _rms_norm_backward[(programs,)](
            dy_NC, x_NC, weight_C, residual, out_NC, partials_PC,
            dy_NC.stride(0), x_NC.stride(0), residual.stride(0), out_NC.stride(0), n, eps,
            C=c, BLOCK_C=block_c, ROWS=rows, HAS_RESIDUAL=d_residual_NC is not None, HAS_DWEIGHT=has_dweight,
            STAGES=stages, num_warps=warps,
        )  # fmt: skip
    if not has_dweight:
        return
    _sum_partials[(triton.cdiv(c, SUM_CHANNELS),)](
        partials_PC, dweight_C, programs,
        C=c, BLOCK_P=triton.next_power_of_2(max(programs, 1)), BLOCK_C=SUM_CHANNELS, ACCUMULATE=accumulate,
        num_warps=16,
    )  # fmt: skip
