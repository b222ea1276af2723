"""Triton for 8-bit forms: how a row that a kernel holds is rounded and stored, and the kernel that only does that."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import begins, dependent
from llmb.ops.quant.activation_quant import GROUP, Activation, Form, as_form, room_for

_LARGEST = tl.constexpr(448.0)
_SMALLEST_AMAX = tl.constexpr(2.0**-100)


@triton.jit
def store_row(x, values_ptr, scale_ptr, places, inside):
    """A whole row of fp32 in e4m3 with one scale."""
    scale = tl.maximum(tl.max(tl.abs(x)), _SMALLEST_AMAX) * (1 / _LARGEST)
    tl.store(values_ptr + places, (x * (1.0 / scale)).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr, scale)


@triton.jit
def store_groups(x, values_ptr, scales_ptr, C: tl.constexpr, WIDE: tl.constexpr):
    """A whole row of fp32 in e4m3 with one scale for each 128 channels; x is WIDE, C of them are there."""
    x = tl.reshape(x, (WIDE // 128, 128))
    scales = tl.maximum(tl.max(tl.abs(x), 1), _SMALLEST_AMAX) * (1 / _LARGEST)
    groups = tl.arange(0, WIDE // 128)
    places = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(values_ptr + places, (x * (1.0 / scales)[:, None]).to(tl.float8e4nv), mask=places < C)
    tl.store(scales_ptr + groups, scales, mask=groups * 128 < C)


@triton.jit
def _round(
    x_ptr, stride, out_ptr, scales_ptr, C: tl.constexpr, WIDE: tl.constexpr, FORM: tl.constexpr, DEPENDENT: tl.constexpr
):
    begins(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDE)
    x = tl.load(x_ptr + row * stride + c, mask=c < C, other=0.0).to(tl.float32)
    if FORM == "rows8":
        store_row(x, out_ptr + row * C, scales_ptr + row, c, c < C)
    else:
        store_groups(x, out_ptr + row * C, scales_ptr + row * (C // 128), C, WIDE)


def in_form_triton(x_NC: Tensor, form: Form) -> Activation:
    """As `in_form`, for the rounded forms; rows must be contiguous."""
    n, c = x_NC.shape
    out_NC, scales = room_for(n, c, form, x_NC)
    wide = max(triton.next_power_of_2(c), GROUP)
    if n:
        _round[(n,)](
            x_NC,
            x_NC.stride(0),
            out_NC,
            scales,
            C=c,
            WIDE=wide,
            FORM=form,
            num_warps=min(max(wide // 512, 1), 16),
            **dependent(n),
        )
    return as_form(out_NC, scales, form)
