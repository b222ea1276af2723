"""Triton for the norm and its way back.

Forward, one program takes one row. Backward, as many programs as the GPU runs at once walk over all rows, so that each
sums the slopes of the weights in registers, with its next rows under way while it works on these; a second small kernel
adds up what the programs found, in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PER_THREAD = 16  # numbers of a row in the forward pass: two loads of 16 bytes in bf16
BACKWARD_NUMBERS = 2048  # of one program at least: one wide row, or several narrow ones
BACKWARD_PER_THREAD = 16
WARPS_PER_MULTIPROCESSOR = 16  # two programs of 4,096 channels each
SHARED_BYTES = 3 << 16  # of a multiprocessor: rows in work, and the next ones on their way
MOST_STAGES = 4
COLUMNS = 32  # weights of one program that adds up: a full line of memory from each part


@triton.jit
def load_row(x_ptr, x_row, C: tl.constexpr, WIDE: tl.constexpr):
    """A program's row in fp32."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    return tl.load(x_ptr + row * x_row + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, x_row, out_row, eps, C: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDE)
    inside = c < C
    x = load_row(x_ptr, x_row, C, WIDE)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x) / C + eps) * weight
    tl.store(out_ptr + row * out_row + c, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dresidual_ptr,
    out_ptr,
    parts_ptr,
    dy_row,
    x_row,
    dresidual_row,
    out_row,
    n,
    eps,
    C: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    c = tl.arange(0, WIDE)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0)[None, :]
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS, num_stages=STAGES):
        x = _rows(x_ptr, x_row, first, n, C, WIDE, ROWS).to(tl.float32)
        dy = _rows(dy_ptr, dy_row, first, n, C, WIDE, ROWS).to(tl.float32)
        if ADDS:
            around = _rows(dresidual_ptr, dresidual_row, first, n, C, WIDE, ROWS).to(tl.float32)
        dnormed = dy * weight.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
        along = (tl.sum(dnormed * x, 1) / C)[:, None] * inverse
        normed = x * inverse
        total += dy * normed
        dx = inverse * (dnormed - normed * along)
        if ADDS:
            dx += around
        place, there = _place(out_row, first, n, C, WIDE, ROWS)
        tl.store(out_ptr + place, dx.to(out_ptr.dtype.element_ty), mask=there)
    tl.store(parts_ptr + tl.program_id(0) * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit
def _rows(ptr, stride, first, n, C: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """The rows from `first` on, as they are in memory; zeros beyond the last."""
    place, there = _place(stride, first, n, C, WIDE, ROWS)
    return tl.load(ptr + place, mask=there, other=0.0)


@triton.jit
def _place(stride, first, n, C: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    return tl.cast(first, tl.int64) * stride + (r * stride + c), (first + r < n) & (c < C)


@triton.jit
def _sum_of_parts(
    parts_ptr, sum_ptr, parts, C: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, FRESH: tl.constexpr
):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)[:, None]
    found = tl.load(parts_ptr + part * C + c[None, :], mask=(part < parts) & (c < C)[None, :], other=0.0)
    total = tl.sum(found, 0)
    if not FRESH:
        total += tl.load(sum_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(sum_ptr + c, total.to(sum_ptr.dtype.element_ty), mask=c < C)


def rms_norm_triton(x_NC: Tensor, weight_C: Tensor, eps: float, out_NC: Tensor) -> None:
    """As `rms_norm.rms_norm_reference`."""
    assert x_NC.stride(1) == out_NC.stride(1) == 1, "channels of a row lie side by side"
    n, c = x_NC.shape
    wide = triton.next_power_of_2(c)
    if n:
        _rms_norm[(n,)](
            x_NC, weight_C, out_NC, x_NC.stride(0), out_NC.stride(0), eps,
            C=c, WIDE=wide, num_warps=min(max(wide // (32 * PER_THREAD), 1), 16),
        )  # fmt: skip


def rms_norm_backward_triton(
    dy_NC: Tensor,
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    dresidual_NC: Tensor | None,
    out_NC: Tensor,
    dweight_C: Tensor,
    fresh: bool,
) -> None:
    """As `rms_norm.rms_norm_backward_reference`."""
    around = dy_NC if dresidual_NC is None else dresidual_NC
    assert {one.stride(1) for one in (dy_NC, x_NC, around, out_NC)} == {1}, "channels of a row lie side by side"
    n, c = x_NC.shape
    wide = triton.next_power_of_2(c)
    rows = max(BACKWARD_NUMBERS // wide, 1)
    warps = min(max(wide, BACKWARD_NUMBERS) // (32 * BACKWARD_PER_THREAD), WARPS_PER_MULTIPROCESSOR)
    beside = WARPS_PER_MULTIPROCESSOR // warps
    parts = min(triton.cdiv(n, rows), _multiprocessors(x_NC.device) * beside)
    stages = min(max(SHARED_BYTES // beside // (3 * rows * wide * x_NC.element_size()), 1), MOST_STAGES)
    parts_PC = torch.empty(parts, c, dtype=torch.float32, device=x_NC.device)
    if n:
        _rms_norm_backward[(parts,)](
            dy_NC, x_NC, weight_C, around, out_NC, parts_PC,
            dy_NC.stride(0), x_NC.stride(0), around.stride(0), out_NC.stride(0), n, eps,
            C=c, WIDE=wide, ROWS=rows, ADDS=dresidual_NC is not None, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    _sum_of_parts[(triton.cdiv(c, COLUMNS),)](
        parts_PC, dweight_C, parts,
        C=c, PARTS=triton.next_power_of_2(max(parts, 1)), COLUMNS=COLUMNS, FRESH=fresh, num_warps=16,
    )  # fmt: skip


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
