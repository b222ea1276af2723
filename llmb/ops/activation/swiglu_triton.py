"""Triton kernels of SwiGLU and its backward: one program takes one block of a row."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.activation.activation_triton import BLOCK, WARPS, activation_value, swiglu_value_and_grads
from llmb.ops.activation.swiglu import empty_act


@triton.jit
def _row_and_channels(F: tl.constexpr, BLOCK: tl.constexpr):
    """Row and channels of this program. Programs of one row are consecutive, as memory is."""
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    return row, (program % blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _swiglu(h_ptr, out_ptr, h_stride, out_stride, F: tl.constexpr, BLOCK: tl.constexpr):
    row, f = _row_and_channels(F, BLOCK)
    gate = tl.load(h_ptr + row * h_stride + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * h_stride + F + f, mask=f < F, other=0.0).to(tl.float32)
    act = activation_value(gate, "silu") * up
    tl.store(out_ptr + row * out_stride + f, act.to(out_ptr.dtype.element_ty), mask=f < F)


@triton.jit
def _swiglu_backward(
    dact_ptr, h_ptr, dact_stride, h_stride, F: tl.constexpr, BLOCK: tl.constexpr, RECOMPUTE: tl.constexpr
):
    row, f = _row_and_channels(F, BLOCK)
    gate = tl.load(h_ptr + row * h_stride + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * h_stride + F + f, mask=f < F, other=0.0).to(tl.float32)
    dact = tl.load(dact_ptr + row * dact_stride + f, mask=f < F, other=0.0).to(tl.float32)
    dgate, dup, act = swiglu_value_and_grads(dact, gate, up, tl.sigmoid(gate))
    tl.store(h_ptr + row * h_stride + f, dgate.to(h_ptr.dtype.element_ty), mask=f < F)
    tl.store(h_ptr + row * h_stride + F + f, dup.to(h_ptr.dtype.element_ty), mask=f < F)
    if RECOMPUTE:
        tl.store(dact_ptr + row * dact_stride + f, act.to(dact_ptr.dtype.element_ty), mask=f < F)


def swiglu_triton(h_N2F: Tensor, out: Tensor | None = None) -> Tensor:
    """Launch the kernel of `swiglu.swiglu`."""
    out_NF = empty_act(h_N2F, out)
    assert h_N2F.stride(1) == out_NF.stride(1) == 1, "channels must be contiguous"
    n, f = out_NF.shape
    if n:
        _swiglu[(n * triton.cdiv(f, BLOCK),)](
            h_N2F, out_NF, h_N2F.stride(0), out_NF.stride(0), F=f, BLOCK=BLOCK, num_warps=WARPS
        )
    return out_NF


def swiglu_backward_triton(dact_NF: Tensor, h_N2F: Tensor, recompute: bool = True) -> None:
    """Launch the kernel of `swiglu.swiglu_backward`."""
    assert h_N2F.stride(1) == dact_NF.stride(1) == 1, "channels must be contiguous"
    n, f = dact_NF.shape
    if n:
        _swiglu_backward[(n * triton.cdiv(f, BLOCK),)](
            dact_NF, h_N2F, dact_NF.stride(0), h_N2F.stride(0), F=f, BLOCK=BLOCK, RECOMPUTE=recompute, num_warps=WARPS
        )
