"""Triton kernel of a step of AdamW: one program takes one block of the flat tensors, whatever their dtypes.

`enable_fp_fusion` is off, and roots and quotients are correctly rounded: the result has the bits of the reference, and
the kernel is still memory-bound. Arguments that change from step to step are floats and unspecialized ints, so nothing
is compiled twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.optim.adam import BF16_MAX, MIX_1, MIX_2, MIX_3, SPREAD, AdamScalars, Rounding

BLOCK, WARPS = 1024, 4  # 8 elements a thread: one load of 16 bytes of bf16, two of fp32

_BF16_MAX = tl.constexpr(BF16_MAX)
_SPREAD, _MIX_1, _MIX_2, _MIX_3 = (tl.constexpr(multiplier) for multiplier in (SPREAD, MIX_1, MIX_2, MIX_3))


@triton.jit
def _random_bits(index, high, key, second_key):
    """Compute `adam.random_bits`, of indices whose upper halves are all `high`."""
    x = index * _SPREAD + (high * _MIX_3 + key)
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15) ^ second_key) * _MIX_2
    x = x ^ (x >> 16)
    return x >> 16, x & 0xFFFF, ((x ^ (x >> 15)) * _MIX_3) >> 16


@triton.jit
def _store(value, ptr, mask, bits, STOCHASTIC: tl.constexpr):
    if ptr.dtype.element_ty == tl.float32:
        tl.store(ptr, value, mask=mask)
    else:
        all_bits = value.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            added = tl.where(tl.abs(value) < _BF16_MAX, bits, 0)
        else:  # half of the last bit, ties to even; NaN would overflow
            added = tl.where(value == value, 0x7FFF + ((all_bits >> 16) & 1), 0)
        rounded = ((all_bits + added) >> 16).to(tl.uint16)
        tl.store(ptr, rounded.to(tl.bfloat16, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["key", "second_key"])
def _adam_update(
    param_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    low_ptr,
    factor_ptr,
    n,
    decay_factor,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    bias_correction2,
    eps,
    step_size,
    key,
    second_key,
    SPLIT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    mask = i < n
    factor = tl.load(factor_ptr)
    gradient = tl.load(grad_ptr + i, mask=mask, other=0.0).to(tl.float32) * factor
    first = tl.load(m_ptr + i, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(v_ptr + i, mask=mask, other=0.0).to(tl.float32)
    if SPLIT:  # param is int16
        high = tl.load(param_ptr + i, mask=mask, other=0).to(tl.int32)
        low = tl.load(low_ptr + i, mask=mask, other=0).to(tl.int32)
        weight = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        weight = tl.load(param_ptr + i, mask=mask, other=0.0).to(tl.float32)

    first = first + (gradient - first) * one_minus_beta1
    second = second * beta2 + gradient * gradient * one_minus_beta2
    denominator = tl.sqrt_rn(second) * bias_correction2 + eps
    weight = weight * decay_factor - tl.div_rn(first, denominator) * step_size

    store_mask = i < tl.where(tl.abs(factor) < float("inf"), n, 0)  # last: no load waits for the factor
    weight_bits, first_bits, second_bits = _random_bits(
        i.to(tl.uint32), (start >> 32).to(tl.uint32), key.to(tl.uint32), second_key.to(tl.uint32)
    )
    if SPLIT:
        bits = tl.where(weight == weight, weight.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        tl.store(param_ptr + i, high.to(tl.int16), mask=store_mask)
        tl.store(low_ptr + i, (bits - (high << 16)).to(tl.int16), mask=store_mask)
    else:
        _store(weight, param_ptr + i, store_mask, weight_bits, STOCHASTIC)
    _store(first, m_ptr + i, store_mask, first_bits, STOCHASTIC)
    _store(second, v_ptr + i, store_mask, second_bits, STOCHASTIC)


def adam_step_triton(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    low: Tensor | None,
    scalars: AdamScalars,
    factor: Tensor,
    rounding: Rounding,
) -> None:
    """Launch the kernel of `adam.adam_step`."""
    tensors = [x for x in (param, grad, m, v, low) if x is not None]
    assert {x.stride() for x in tensors} == {(1,)}, "tensors must be flat"
    n = param.numel()
    if n:
        _adam_update[(triton.cdiv(n, BLOCK),)](
            param if low is None else param.view(torch.int16), grad, m, v, param if low is None else low, factor, n,
            *scalars, SPLIT=low is not None, STOCHASTIC=rounding == "stochastic", BLOCK=BLOCK,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
