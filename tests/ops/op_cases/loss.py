"""Cross-entropy and the scaled add of its gradient."""

from math import inf, nan

import torch
from torch import Generator, Tensor, bfloat16, device, dtype, float32

from llmb.ops.loss.cross_entropy import cross_entropy_grad_, vocab_parallel_grad_, vocab_parallel_logsumexp
from llmb.ops.loss.scaled_add import scaled_add_
from op_cases import Arguments, cases, full_size_cases, in_wider_rows, randn

VOCABULARIES = ((300, 128256), (7, 152064), (5, 50257))


@cases(
    cross_entropy_grad_, (5, 7), (3, 1), (2, 16384), (2, 16385, 30.0), (4, 100, 0.0), (3, 40, 1, True), tolerance=2e-6
)
@cases(cross_entropy_grad_, (5, 7, 3, False, float32, 2.0), (3, 16385, 40, True, float32, 30.0), tolerance=2e-6)
@cases(cross_entropy_grad_, (4, 24, 1, False, bfloat16), (4, 24, 9, False, bfloat16, 5.0), tolerance=2**-7)
@cases(cross_entropy_grad_, (3, 1003, 1e3), (4, 2 * 16384 + 5, 1e3), tolerance=1e-3)  # error of rounded logits
@full_size_cases(
    cross_entropy_grad_,
    *((*rows, scale, True, t) for rows in VOCABULARIES for scale in (1, 100) for t in (float32, bfloat16)),
    *((300, 256000, 20, True, t, 30.0) for t in (float32, bfloat16)),
    tolerance=5e-5,
)
def logits(
    g: Generator, d: device, n: int, v: int, scale: float = 1, on_device: bool = False, dtype: dtype = float32,
    softcap: float | None = None,
) -> Arguments:  # fmt: skip
    labels = torch.randint(v, (n,), generator=g)
    labels[-1] = -100  # ignored
    losses, factor = torch.full((n,), 7.0, device=d), torch.tensor(0.125, device=d) if on_device else 0.125
    return (randn(g, d, n, v, scale=scale, dtype=dtype), labels.to(d), factor, losses, softcap), {}


@cases(cross_entropy_grad_, (5, 24), tolerance=2**-7)
def logits_inside_wider_rows(g: Generator, d: device, n: int, v: int) -> Arguments:
    labels = torch.arange(n, dtype=torch.int32, device=d) - 1
    x = in_wider_rows(randn(g, d, n, v, scale=2, dtype=bfloat16))
    return (x, labels, torch.tensor(0.125, device=d), torch.full((n,), 7.0, device=d)), {}


@cases(cross_entropy_grad_, ([1.0, -inf, 2.0, 1.5], 0), ([1.0, -inf, 2.0, 3e38], 3), tolerance=2e-6)
@cases(cross_entropy_grad_, ([0.0, 0.0, nan, 0.0], 1), ([0.0, 0.0, nan, 0.0], -1), tolerance=0)
def special_logits(g: Generator, d: device, row: list[float], label: int) -> Arguments:
    return (torch.tensor([row], device=d), torch.tensor([label], device=d), 1.0, torch.full((1,), 7.0, device=d)), {}


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


@cases(vocab_parallel_logsumexp, ([-inf, -inf], 0), ([0.0, nan], 3), tolerance=2e-6)
def special_local_logits(g: Generator, d: device, row: list[float], label: int) -> Arguments:
    tensors = torch.tensor([row], device=d), torch.tensor([label], device=d)
    return (*tensors, 0, torch.full((1,), 7.0, device=d), torch.full((1,), 7.0, device=d)), {}


@cases(vocab_parallel_grad_, ([-inf, -inf], 3, 2.3), ([0.0, 1.0], 3, nan), ([0.0, nan], 1, nan), tolerance=2e-6)
def special_local_logits_and_lse(g: Generator, d: device, row: list[float], label: int, lse: float) -> Arguments:
    return (*(torch.tensor(x, device=d) for x in ([row], [label])), 0, torch.tensor([lse], device=d), 1.0), {}


FIRST = 50


def local_labels(n: int, v: int) -> Tensor:
    """Labels at and beyond both ends of the range of a rank."""
    return torch.tensor([FIRST + v - 1, FIRST, FIRST - 1, FIRST + v, 0])[:n]


DTYPES = [(total, x, accumulate) for total in (float32, bfloat16) for x in (float32, bfloat16) for accumulate in (0, 1)]


@cases(scaled_add_, *((n, *d) for n in (5000, 33, 1, 0) for d in DTYPES if d[0] == float32), tolerance=2e-7)
@cases(scaled_add_, *((n, *d) for n in (5000, 33) for d in DTYPES if d[0] == bfloat16), tolerance=2**-7)
@full_size_cases(scaled_add_, *((4099 * 4096, *dtypes) for dtypes in DTYPES if dtypes[1] == float32), tolerance=1e-6)
def flat(g: Generator, d: device, n: int, total: dtype, x: dtype, accumulate: bool) -> Arguments:
    before = randn(g, d, n, dtype=total) if accumulate else torch.full((n,), nan, dtype=total, device=d)  # not read
    return (before, randn(g, d, n, dtype=x), torch.tensor(0.3, device=d), bool(accumulate)), {}


@cases(scaled_add_, (5000, 0), (5000, 1), (33, 1), tolerance=2e-7)
def without_scale(g: Generator, d: device, n: int, accumulate: bool) -> Arguments:
    return (randn(g, d, n), randn(g, d, n, dtype=bfloat16), None, bool(accumulate)), {}


@cases(scaled_add_, (5000, False), (5000, True), tolerance=2e-7)
def over_itself(g: Generator, d: device, n: int, accumulate: bool) -> Arguments:
    x = randn(g, d, n)
    return (x, x, torch.tensor(0.5, device=d), accumulate), {}


@cases(scaled_add_, tolerance=2e-7)
def special_values(g: Generator, d: device) -> Arguments:
    x = torch.tensor([1e38, -1e-38, 0.0, inf, nan], device=d)
    return (torch.ones(5, device=d), x, torch.tensor(2.0, device=d), True), {}
