"""Token selection."""

from math import inf, nan

from torch import Generator, bfloat16, device, dtype, float32, randint, zeros

from llmb.ops.sampling.argmax import argmax
from op_cases import Arguments, cases, full_size_cases, randn


@cases(argmax, (0, 9), (1, 1), (3, 2048), (2, 5000), (65, 8200), (4, 100, bfloat16), tolerance=0)
@full_size_cases(argmax, *((s, 128_256, bfloat16) for s in (1, 4, 300)), tolerance=0, exact=None)
def rows(g: Generator, d: device, s: int, v: int, dtype: dtype = float32) -> Arguments:
    return (randn(g, d, s, v, dtype=dtype),), {}


@cases(argmax, (-inf,), (inf,), (nan,), tolerance=0)
def special_values(g: Generator, d: device, value: float) -> Arguments:
    x = zeros(2, 3000, device=d)
    x[0], x[1, 2500] = value, value
    return (x,), {}


@cases(argmax, (97, 2), (2049, 2), (5000, 6), tolerance=0)
def ties(g: Generator, d: device, v: int, values: int) -> Arguments:
    return (randint(values, (3, v), generator=g).to(d, float32),), {}
