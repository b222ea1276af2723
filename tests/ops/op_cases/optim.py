"""AdamW, bit for bit."""

import torch
from torch import Generator, bfloat16, device, dtype, float32

from llmb.ops.optim.adam import Rounding, adam_scalars, adam_step
from op_cases import Arguments, cases, full_size_cases, randn

STATES = (  # dtypes of parameter, gradient and moments; low bits; rounding
    (float32, float32, float32, False, "nearest"),
    (bfloat16, float32, float32, True, "nearest"),
    (bfloat16, bfloat16, bfloat16, True, "stochastic"),
    (bfloat16, bfloat16, bfloat16, False, "stochastic"),
    (bfloat16, float32, bfloat16, False, "nearest"),
    (bfloat16, bfloat16, bfloat16, False, "nearest"),
    (bfloat16, float32, bfloat16, True, "stochastic"),
)


@cases(adam_step, *((*state, n) for state in STATES for n in (1, 3000)), tolerance=0)
@cases(adam_step, *((*state, 70, float("inf")) for state in STATES[:2]), (*STATES[2], 70, float("nan")), tolerance=0)
@cases(adam_step, *((*state, 70, 0.5, scale) for state in STATES for scale in (0.0, 1e15)), tolerance=0)
@full_size_cases(
    adam_step,
    *((*state, n, factor) for state in STATES for n, factor in ((10_000_000, 0.3), (1_000_003, float("inf")))),
    tolerance=0,
    exact=None,
)
def step(
    g: Generator, d: device, param: dtype, grad: dtype, moments: dtype, low: bool, rounding: Rounding, n: int,
    factor: float = 0.5, grad_scale: float = 1,
) -> Arguments:  # fmt: skip
    low_bits = torch.randint(-(2**15), 2**15, (n,), generator=g).to(d, torch.int16) if low else None
    m, v = randn(g, d, n, dtype=moments), randn(g, d, n).square().to(moments)
    scalars = adam_scalars(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, seed=11)
    tensors = randn(g, d, n, dtype=param), randn(g, d, n, dtype=grad, scale=grad_scale), m, v, low_bits
    return (*tensors, scalars, torch.tensor(factor, device=d), rounding), {}
