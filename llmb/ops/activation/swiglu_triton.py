"""Triton for the gated activation and its way back: one program takes one stretch of a row."""

import triton
import triton.language as tl
from torch import Tensor

STRETCH, WARPS = 2048, 4  # 16 numbers a thread of each tensor: two loads of 16 bytes in bf16


@triton.jit
def _stretch(F: tl.constexpr, STRETCH: tl.constexpr):
    """The row and the channels of this program. Programs of one row come one after another, as memory does."""
    stretches: tl.constexpr = (F + STRETCH - 1) // STRETCH
    program = tl.program_id(0)
    row = (program // stretches).to(tl.int64)
    return row, (program % stretches) * STRETCH + tl.arange(0, STRETCH)


@triton.jit
def _swiglu(h_ptr, out_ptr, h_row, out_row, F: tl.constexpr, STRETCH: tl.constexpr):
    row, f = _stretch(F, STRETCH)
    gate = tl.load(h_ptr + row * h_row + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * h_row + F + f, mask=f < F, other=0.0).to(tl.float32)
    act = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_row + f, act.to(out_ptr.dtype.element_ty), mask=f < F)


@triton.jit
def _swiglu_backward(dact_ptr, h_ptr, dact_row, h_row, F: tl.constexpr, STRETCH: tl.constexpr, AGAIN: tl.constexpr):
    row, f = _stretch(F, STRETCH)
    gate = tl.load(h_ptr + row * h_row + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * h_row + F + f, mask=f < F, other=0.0).to(tl.float32)
    dact = tl.load(dact_ptr + row * dact_row + f, mask=f < F, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    opened = gate * share
    dgate = dact * up * share * (1 + gate * (1 - share))
    tl.store(h_ptr + row * h_row + f, dgate.to(h_ptr.dtype.element_ty), mask=f < F)
    tl.store(h_ptr + row * h_row + F + f, (dact * opened).to(h_ptr.dtype.element_ty), mask=f < F)
    if AGAIN:
        tl.store(dact_ptr + row * dact_row + f, (opened * up).to(dact_ptr.dtype.element_ty), mask=f < F)


def swiglu_triton(h_N2F: Tensor, out_NF: Tensor) -> None:
    """As `swiglu.swiglu_reference`."""
    assert h_N2F.stride(1) == out_NF.stride(1) == 1, "channels of a row lie side by side"
    n, f = out_NF.shape
    if n:
        _swiglu[(n * triton.cdiv(f, STRETCH),)](
            h_N2F, out_NF, h_N2F.stride(0), out_NF.stride(0), F=f, STRETCH=STRETCH, num_warps=WARPS
        )


def swiglu_backward_triton(dact_NF: Tensor, h_N2F: Tensor, again: bool = True) -> None:
    """As `swiglu.swiglu_backward_reference`."""
    assert h_N2F.stride(1) == dact_NF.stride(1) == 1, "channels of a row lie side by side"
    n, f = dact_NF.shape
    if n:
        _swiglu_backward[(n * triton.cdiv(f, STRETCH),)](
            dact_NF, h_N2F, dact_NF.stride(0), h_N2F.stride(0), F=f, STRETCH=STRETCH, AGAIN=again, num_warps=WARPS
        )
