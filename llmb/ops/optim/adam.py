"""One step of AdamW over flat tensors of any of the dtypes that a run stores them in, in one pass over memory.

Computed in fp32. State in bf16 is rounded to nearest, or with stochastic rounding, so that nothing is lost on average:
the random bits are a hash of the seed and the index of a value, so results depend on nothing else. A parameter may be a
split master weight with the 16 low bits of its fp32 value in `low`: then (bits of param << 16) + low are the bits of
the fp32 weight, and param is that weight rounded.

A clip factor that is not finite means that the gradients are not either: nothing is changed then.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import op

Rounding = Literal["nearest", "stochastic"]

# Largest finite bf16. From there on stochastic rounding truncates, so that no finite number becomes infinite.
BF16_MAX = 3.3895313892515355e38

# Values that one core updates with its temporaries in cache. Torch shares larger ones among threads: four times slower.
CPU_BLOCK = 1 << 15

# Odd multipliers of 32-bit hashes that spread each input bit over half of the output bits.
SPREAD, MIX_1, MIX_2, MIX_3 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0x2C1B3C6D


class AdamScalars(NamedTuple):
    """The scalars of one step as the kernel takes them, computed once on the host in double precision."""

    decay_factor: float  # 1 - lr * weight decay
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction2: float  # factor of sqrt(v)
    eps: float
    step_size: float  # learning rate times the bias correction of m
    key: int  # two 32-bit keys of the random bits, as signed numbers
    second_key: int


def adam_scalars(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, seed: int
) -> AdamScalars:
    """Return the scalars of the step with this number, counted from 1."""
    lr, beta1, beta2 = float(lr), float(beta1), float(beta2)  # an int would be compiled into the kernel
    key = _hash_64(seed)
    return AdamScalars(
        decay_factor=1 - lr * weight_decay,
        one_minus_beta1=1 - beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        bias_correction2=1 / math.sqrt(1 - beta2**step),
        eps=float(eps),
        step_size=lr / (1 - beta1**step),
        key=_signed_32(key),
        second_key=_signed_32(key >> 32),
    )


def adam_update(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    low: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: Tensor,
    rounding: Rounding,
    seed: int,
) -> None:
    """Update param, m, v (and low) in place; `factor`, an fp32 scalar on the device, scales the gradient.

    All are flat and bf16 or fp32, low int16. The seed should differ between steps and between tensors.
    """
    scalars = adam_scalars(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step, seed=seed)
    adam_step(param, grad, m, v, low, scalars, factor, rounding)


@op
def adam_step(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    low: Tensor | None,
    scalars: AdamScalars,
    factor: Tensor,
    rounding: Rounding,
) -> None:
    """Update in place, with the bits of the kernel: each product, sum, root and quotient is rounded by itself."""
    if not torch.isfinite(factor):
        return
    count = param.numel()
    block = CPU_BLOCK if param.device.type == "cpu" else max(count, 1)
    for start in range(0, count, block):
        values = slice(start, start + block)
        block_low = None if low is None else low[values]
        _adam_block(param[values], grad[values], m[values], v[values], block_low, scalars, factor, rounding, start)


def _adam_block(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    low: Tensor | None,
    scalars: AdamScalars,
    factor: Tensor,
    rounding: Rounding,
    start: int,
) -> None:
    """Update the values from `start` of the flat tensors."""
    weight = param.float() if low is None else join_master_weight(param, low)
    gradient = grad.float() * factor
    first = m.float()
    first = first + (gradient - first) * scalars.one_minus_beta1
    second = v.float() * scalars.beta2 + gradient * gradient * scalars.one_minus_beta2
    root = torch.sqrt(second.double()).float()  # torch's of fp32 may be off by a bit on a CPU
    denominator = root * scalars.bias_correction2 + scalars.eps
    weight = weight * scalars.decay_factor - first / denominator * scalars.step_size
    stochastic = rounding == "stochastic"
    bits = random_bits(start, param.numel(), scalars, param.device) if stochastic else (None, None, None)
    if low is None:
        _store(weight, param, bits[0])
    else:
        split_master_weight(weight, param, low)
    _store(first, m, bits[1])
    _store(second, v, bits[2])


def join_master_weight(param: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 weights of split master weights."""
    return ((param.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split_master_weight(weight: Tensor, param: Tensor, low: Tensor) -> None:
    """Split fp32 weights into the nearest bf16 numbers and the low bits that complete them."""
    bits = torch.where(weight.isnan(), torch.nan, weight).view(torch.int32)  # other NaNs would round to numbers
    high = (bits + 0x8000) >> 16
    param.view(torch.int16).copy_(high)
    low.copy_(bits - (high << 16))


def random_bits(start: int, count: int, scalars: AdamScalars, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return 16 random bits for parameter, m and v of each value from `start`: a hash of its index with two keys."""
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x = _low_32((index & 0xFFFFFFFF) * SPREAD + (index >> 32) * MIX_3 + scalars.key)
    x = _low_32((x ^ (x >> 16)) * MIX_1)
    x = _low_32((x ^ (x >> 15) ^ (scalars.second_key & 0xFFFFFFFF)) * MIX_2)
    x = x ^ (x >> 16)
    return x >> 16, x & 0xFFFF, _low_32((x ^ (x >> 15)) * MIX_3) >> 16


def _store(value: Tensor, out: Tensor, bits: Tensor | None) -> None:
    if out.dtype == torch.bfloat16 and bits is not None:
        added = torch.where(value.abs() < BF16_MAX, bits, 0).int()
        out.view(torch.int16).copy_((value.view(torch.int32) + added) >> 16)
    else:
        out.copy_(value)


def _hash_64(seed: int) -> int:
    """Return a 64-bit number of which each bit depends on all bits of the seed."""
    key = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    key = ((key ^ (key >> 32)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
    key = ((key ^ (key >> 32)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
    return key ^ (key >> 32)


def _signed_32(number: int) -> int:
    number &= 0xFFFFFFFF
    return number - (number >> 31 << 32)


def _low_32(x: Tensor) -> Tensor:
    return x & 0xFFFFFFFF
