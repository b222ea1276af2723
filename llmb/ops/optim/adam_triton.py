"""Triton for a step of AdamW: one program takes one stretch of the flat tensors, whatever their formats.

`enable_fp_fusion` is off, and roots and quotients are the exact ones: the result is that of the reference to the bit,
and memory is still what bounds it. What changes from step to step are floats and unspecialised ints: nothing is
compiled twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.optim.adam import LARGEST_BF16, MIX_1, MIX_2, MIX_3, SPREAD, AdamScalars, Rounding

STRETCH, WARPS = 1024, 4  # 8 numbers a thread: one load of 16 bytes of bf16, two of fp32

_LARGEST_BF16 = tl.constexpr(LARGEST_BF16)
_SPREAD, _MIX_1, _MIX_2, _MIX_3 = (tl.constexpr(one) for one in (SPREAD, MIX_1, MIX_2, MIX_3))


@triton.jit
def _random_bits(place, high, key, second_key):
    """As `adam.random_bits`, of places whose upper halves are all `high`."""
    x = place * _SPREAD + (high * _MIX_3 + key)
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15) ^ second_key) * _MIX_2
    x = x ^ (x >> 16)
    return x >> 16, x & 0xFFFF, ((x ^ (x >> 15)) * _MIX_3) >> 16


@triton.jit
def _store(exact, ptr, changes, bits, STOCHASTIC: tl.constexpr):
    if ptr.dtype.element_ty == tl.float32:
        tl.store(ptr, exact, mask=changes)
    else:
        all_bits = exact.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            added = tl.where(tl.abs(exact) < _LARGEST_BF16, bits, 0)
        else:  # half of the last kept bit, ties to even; NaN would be carried past itself
            added = tl.where(exact == exact, 0x7FFF + ((all_bits >> 16) & 1), 0)
        kept = ((all_bits + added) >> 16).to(tl.uint16)
        tl.store(ptr, kept.to(tl.bfloat16, bitcast=True), mask=changes)


@triton.jit(do_not_specialize=["key", "second_key"])
def _adam_update(
    param_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    low_ptr,
    factor_ptr,
    n,
    keep,
    take_first,
    beta2,
    take_second,
    unbias_second,
    eps,
    rate,
    key,
    second_key,
    EXACT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STRETCH: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * STRETCH
    place = start + tl.arange(0, STRETCH)
    inside = place < n
    factor = tl.load(factor_ptr)
    slope = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * factor
    first = tl.load(m_ptr + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(v_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if EXACT:  # param comes as int16
        high = tl.load(param_ptr + place, mask=inside, other=0).to(tl.int32)
        low = tl.load(low_ptr + place, mask=inside, other=0).to(tl.int32)
        weight = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        weight = tl.load(param_ptr + place, mask=inside, other=0.0).to(tl.float32)

    first = first + (slope - first) * take_first
    second = second * beta2 + slope * slope * take_second
    size = tl.sqrt_rn(second) * unbias_second + eps
    weight = weight * keep - tl.div_rn(first, size) * rate

    changes = place < tl.where(tl.abs(factor) < float("inf"), n, 0)  # at the end: no load waits for the factor
    for_weight, for_first, for_second = _random_bits(
        place.to(tl.uint32), (start >> 32).to(tl.uint32), key.to(tl.uint32), second_key.to(tl.uint32)
    )
    if EXACT:
        bits = tl.where(weight == weight, weight.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        tl.store(param_ptr + place, high.to(tl.int16), mask=changes)
        tl.store(low_ptr + place, (bits - (high << 16)).to(tl.int16), mask=changes)
    else:
        _store(weight, param_ptr + place, changes, for_weight, STOCHASTIC)
    _store(first, m_ptr + place, changes, for_first, STOCHASTIC)
    _store(second, v_ptr + place, changes, for_second, STOCHASTIC)


def adam_update_triton(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    low: Tensor | None,
    scalars: AdamScalars,
    factor: Tensor,
    rounding: Rounding,
) -> None:
    """As `adam.adam_update_reference`."""
    tensors = [one for one in (param, grad, m, v, low) if one is not None]
    assert {one.stride() for one in tensors} == {(1,)}, "flat tensors"
    n = param.numel()
    if n:
        _adam_update[(triton.cdiv(n, STRETCH),)](
            param if low is None else param.view(torch.int16), grad, m, v, param if low is None else low, factor, n,
            *scalars, EXACT=low is not None, STOCHASTIC=rounding == "stochastic", STRETCH=STRETCH,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
