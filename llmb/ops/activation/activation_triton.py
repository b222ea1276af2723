"""Triton for an MLP's activation and its way back: one program takes one stretch of memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH, WARPS = 2048, 4  # 16 numbers a thread of each tensor: two loads of 16 bytes in bf16


@triton.jit
def _value_and_slope(x, KIND: tl.constexpr):
    """The activation, and its derivative."""
    if KIND == "silu":
        share = tl.sigmoid(x)
        return x * share, share * (1 + x * (1 - share))
    elif KIND == "gelu":  # tanh(y) = 2 * sigmoid(2 y) - 1
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        open_or_shut = (share == 0) | (share == 1)  # far out, where the cube may be infinite
        bend = share * (1 - share) * 1.5957691216057308 * x * (1 + 0.134145 * x * x)
        return x * share, share + tl.where(open_or_shut, 0.0, bend)
    else:
        above = tl.maximum(x, 0.0)
        above = tl.where(x == x, above, x)  # a NaN stays one
        return above * above, 2 * above


@triton.jit
def _activated(x_ptr, up_ptr, out_ptr, n, KIND: tl.constexpr, GATED: tl.constexpr, STRETCH: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    act, _ = _value_and_slope(tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32), KIND)
    if GATED:
        act *= tl.load(up_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, act.to(out_ptr.dtype.element_ty), mask=place < n)


@triton.jit
def _activated_backward(
    dact_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, n, KIND: tl.constexpr, GATED: tl.constexpr, STRETCH: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    dact = tl.load(dact_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    act, slope = _value_and_slope(tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32), KIND)
    dx = dact * slope
    if GATED:
        dx *= tl.load(up_ptr + place, mask=place < n, other=0.0).to(tl.float32)
        tl.store(dup_ptr + place, (dact * act).to(dup_ptr.dtype.element_ty), mask=place < n)
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=place < n)


def activated_triton(x: Tensor, activation: str, up: Tensor | None) -> Tensor:
    """As `fused_activation.activated_reference`."""
    x, n = x.contiguous(), x.numel()
    gate = x if up is None else up.contiguous()
    out = torch.empty_like(x)
    if n:
        _activated[(triton.cdiv(n, STRETCH),)](
            x, gate, out, n, KIND=activation, GATED=up is not None, STRETCH=STRETCH, num_warps=WARPS
        )
    return out


def activated_backward_triton(
    dact: Tensor, x: Tensor, activation: str, up: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """As `fused_activation.activated_backward_reference`."""
    dact, x, n = dact.contiguous(), x.contiguous(), x.numel()
    gate = x if up is None else up.contiguous()
    dx, dup = torch.empty_like(x), None if up is None else torch.empty_like(gate)
    if n:
        _activated_backward[(triton.cdiv(n, STRETCH),)](
            dact, x, gate, dx, dx if dup is None else dup, n,
            KIND=activation, GATED=up is not None, STRETCH=STRETCH, num_warps=WARPS,
        )  # fmt: skip
    return dx, dup
