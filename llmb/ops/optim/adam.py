"""One step of AdamW over flat tensors of any of the formats a run keeps them in, in one pass over memory.

Computed in fp32. What is kept in bf16 is rounded to the nearest number, or at random to one of its two neighbours so
that on average nothing is lost ("stochastic"): the random bits come from hashing the seed with the place of a number,
so a result depends on nothing else. A parameter may instead keep the low half of its fp32 self in `low`: then
(bits of param << 16) + low are the bits of the exact weight, and param is that weight rounded.

A clip factor that is not finite says that the gradients are not either: nothing changes then.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton

Rounding = Literal["nearest", "stochastic"]

# Largest finite bf16. From there on stochastic rounding cuts off, so that no finite number becomes infinite.
LARGEST_BF16 = 3.3895313892515355e38

# Odd multipliers of 32-bit hashes that spread each input bit over half of the output bits.
SPREAD, MIX_1, MIX_2, MIX_3 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0x2C1B3C6D


class AdamScalars(NamedTuple):
    """The numbers of one step as kernels want them: what is the same for all values is worked out once, in double."""

    keep: float  # what weight decay leaves of a parameter
    take_first: float  # 1 - beta1: the gradient's share of m
    beta2: float
    take_second: float  # 1 - beta2: the squared gradient's share of v
    unbias_second: float  # what brings sqrt(v) to its size despite having begun at 0
    eps: float
    rate: float  # learning rate over the same for m
    key: int  # two 32-bit keys of the random bits, as signed numbers
    second_key: int


def adam_scalars(
    *, lr: float, beta1: float, beta2: float, eps: float, decay: float, step: int, seed: int
) -> AdamScalars:
    """Of the step with this number, counted from 1."""
    lr, beta1, beta2 = float(lr), float(beta1), float(beta2)  # a whole number would be compiled into the kernel
    key = _mixed_64(seed)
    return AdamScalars(
        keep=1 - lr * decay,
        take_first=1 - beta1,
        beta2=beta2,
        take_second=1 - beta2,
        unbias_second=1 / math.sqrt(1 - beta2**step),
        eps=float(eps),
        rate=lr / (1 - beta1**step),
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
    decay: float,
    step: int,
    factor: Tensor,
    rounding: Rounding,
    seed: int,
) -> None:
    """param, m, v (and low) become those after this step; `factor`, an fp32 number on the device, scales the gradient.

    All are flat and bf16 or fp32, low int16. The seed should differ between steps and between tensors."""
    scalars = adam_scalars(lr=lr, beta1=beta1, beta2=beta2, eps=eps, decay=decay, step=step, seed=seed)
    if takes_triton(param):
        from llmb.ops.optim.adam_triton import adam_update_triton

        adam_update_triton(param, grad, m, v, low, scalars, factor, rounding)
    else:
        adam_update_reference(param, grad, m, v, low, scalars, factor, rounding)


def adam_update_reference(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    low: Tensor | None,
    scalars: AdamScalars,
    factor: Tensor,
    rounding: Rounding,
) -> None:
    """The same in plain torch, to the bit: every product, sum, root and quotient is rounded by itself in both."""
    if not torch.isfinite(factor):
        return
    weight = param.float() if low is None else exact_weight(param, low)
    slope = grad.float() * factor
    first = m.float()
    first = first + (slope - first) * scalars.take_first
    second = v.float() * scalars.beta2 + slope * slope * scalars.take_second
    root = torch.sqrt(second.double()).float()  # torch's of fp32 may be off by a bit on a CPU
    size = root * scalars.unbias_second + scalars.eps
    weight = weight * scalars.keep - first / size * scalars.rate
    bits = random_bits(param.numel(), scalars, param.device) if rounding == "stochastic" else (None, None, None)
    if low is None:
        _store(weight, param, bits[0])
    else:
        split_weight(weight, param, low)
    _store(first, m, bits[1])
    _store(second, v, bits[2])


def exact_weight(param: Tensor, low: Tensor) -> Tensor:
    """The fp32 weights that param rounds."""
    return ((param.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split_weight(exact: Tensor, param: Tensor, low: Tensor) -> None:
    """The other way round: param and low become those of fp32 weights."""
    bits = torch.where(exact.isnan(), torch.nan, exact).view(torch.int32)  # others' low halves would round past NaN
    high = (bits + 0x8000) >> 16
    param.view(torch.int16).copy_(high)
    low.copy_(bits - (high << 16))


def random_bits(values: int, scalars: AdamScalars, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """16 random bits for each value's parameter, m and v: a hash of its place, keyed twice."""
    place = torch.arange(values, dtype=torch.int64, device=device)
    x = _low_32((place & 0xFFFFFFFF) * SPREAD + (place >> 32) * MIX_3 + scalars.key)
    x = _low_32((x ^ (x >> 16)) * MIX_1)
    x = _low_32((x ^ (x >> 15) ^ (scalars.second_key & 0xFFFFFFFF)) * MIX_2)
    x = x ^ (x >> 16)
    return x >> 16, x & 0xFFFF, _low_32((x ^ (x >> 15)) * MIX_3) >> 16


def _store(exact: Tensor, kept: Tensor, bits: Tensor | None) -> None:
    if kept.dtype == torch.bfloat16 and bits is not None:
        added = torch.where(exact.abs() < LARGEST_BF16, bits, 0).int()
        kept.view(torch.int16).copy_((exact.view(torch.int32) + added) >> 16)
    else:
        kept.copy_(exact)


def _mixed_64(seed: int) -> int:
    """A 64-bit number any bit of which depends on all of the seed's."""
    key = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    key = ((key ^ (key >> 32)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
    key = ((key ^ (key >> 32)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
    return key ^ (key >> 32)


def _signed_32(number: int) -> int:
    number &= 0xFFFFFFFF
    return number - (number >> 31 << 32)


def _low_32(x: Tensor) -> Tensor:
    return x & 0xFFFFFFFF
