"""AdamW, bit for bit."""

import torch
from torch import Generator, bfloat16, device, dtype, float32

from llmb.ops.optim.adam import Rounding, adam_scalars, adam_step
from op_cases import Arguments, cases, randn

STATES = (  # dtypes of parameter, gradient and moments; low bits; rounding
    (float32, float32, float32, False, "nearest"),
    (bfloat16, float32, float32, True, "nearest"),
    (bfloat16, bfloat16, bfloat16, True, "stochastic"),
    (bfloat16, bfloat16, bfloat16, False, "stochastic"),
    (bfloat16, float32, bfloat16, False, "nearest"),
)


@cases(adam_step, *((*state, n) for state in STATES for n in (1, 3000)), tolerance=0)
@cases(adam_step, *((*state, 70, float("inf")) for state in STATES[:2]), (*STATES[2], 70, float("nan")), tolerance=0)
def step(
    g: Generator, d: device, param: dtype, grad: dtype, moments: dtype, low: bool, rounding: Rounding, n: int,
    factor: float = 0.5,
) -> Arguments:  # fmt: skip
    low_bits = torch.randint(-(2**15), 2**15, (n,), generator=g).to(d, torch.int16) if low else None
    m, v = randn(g, d, n, dtype=moments), randn(g, d, n).square().to(moments)
    scalars = adam_scalars(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, seed=11)
    tensors = randn(g, d, n, dtype=param), randn(g, d, n, dtype=grad), m, v, low_bits
    return (*tensors, scalars, torch.tensor(factor, device=d), rounding), {}
