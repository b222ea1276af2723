"""Cross-entropy and the scaled add of its gradient."""

import torch
from torch import Generator, Tensor, bfloat16, device, dtype, float32

from llmb.ops.loss.cross_entropy import cross_entropy_grad_, vocab_parallel_grad_, vocab_parallel_logsumexp
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


@cases(vocab_parallel_logsumexp, (5, 7), (1, 1), (3, 4096), (3, 4097, 30.0), (4, 100, 0.0), tolerance=2e-6)
@cases(vocab_parallel_logsumexp, (4, 24, 1, bfloat16), (3, 8200, 30.0, bfloat16), tolerance=2e-6)
def local_logits(g: Generator, d: device, n: int, v: int, scale: float = 1, dtype: dtype = float32) -> Arguments:
    x, labels, first = randn(g, d, n, v, scale=scale, dtype=dtype), local_labels(n, v).to(d), FIRST
    return (x, labels, first, torch.full((n,), 7.0, device=d), torch.full((n,), 7.0, device=d)), {}


@cases(vocab_parallel_grad_, (5, 7), (1, 1), (3, 4096), (3, 4097, 30.0), (4, 100, 0.0), tolerance=2e-6)
@cases(vocab_parallel_grad_, (4, 24, 1, bfloat16), (3, 8200, 30.0, bfloat16), tolerance=2**-7)
def logits_and_lse(g: Generator, d: device, n: int, v: int, scale: float = 1, dtype: dtype = float32) -> Arguments:
    x = randn(g, d, n, v, scale=scale, dtype=dtype)
    lse = x.float().logsumexp(-1) + torch.rand(n, generator=g).to(d)  # as if another rank had more logits
    return (x, local_labels(n, v).to(d), FIRST, lse, 0.125), {}


FIRST = 50


def local_labels(n: int, v: int) -> Tensor:
    """Labels at and beyond both ends of the range of a rank."""
    return torch.tensor([FIRST + v - 1, FIRST, FIRST - 1, FIRST + v, 0])[:n]


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
