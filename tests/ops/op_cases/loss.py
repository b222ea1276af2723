"""Cross-entropy and the scaled add of its gradient."""

import torch
from torch import Generator, bfloat16, device, dtype, float32

from llmb.ops.loss.cross_entropy import cross_entropy_grad_
from llmb.ops.loss.scaled_add import scaled_add_
from op_cases import Arguments, cases, randn


@cases(
    cross_entropy_grad_, (5, 7), (3, 1), (2, 16384), (2, 16385, 30.0), (4, 100, 0.0), (3, 40, 1, True), tolerance=2e-6
)
@cases(cross_entropy_grad_, (4, 24, 1, False, bfloat16), tolerance=2**-7)
def logits(
    g: Generator, d: device, n: int, v: int, scale: float = 1, on_device: bool = False, dtype: dtype = float32
) -> Arguments:
    labels = torch.randint(v, (n,), generator=g)
    labels[-1] = -100  # ignored
    losses, factor = torch.full((n,), 7.0, device=d), torch.tensor(0.125, device=d) if on_device else 0.125
    return (randn(g, d, n, v, scale=scale, dtype=dtype), labels.to(d), factor, losses), {}


@cases(
    scaled_add_,
    (5000, float32, bfloat16, True),
    (33, float32, float32, False),
    (1, float32, float32, True),
    tolerance=2e-7,
)
@cases(scaled_add_, (5000, bfloat16, float32, False), (33, bfloat16, bfloat16, True), tolerance=2**-7)
def flat(g: Generator, d: device, n: int, total: dtype, x: dtype, accumulate: bool) -> Arguments:
    return (randn(g, d, n, dtype=total), randn(g, d, n, dtype=x), torch.tensor(0.3, device=d), accumulate), {}
