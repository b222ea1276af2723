"""Token selection."""

from torch import Generator, bfloat16, device, dtype, float32

from llmb.ops.sampling.argmax import argmax
from op_cases import Arguments, cases, randn


@cases(argmax, (1, 1), (3, 2048), (2, 5000), (65, 300), (4, 100, bfloat16), tolerance=0)  # bf16 has equal values
def rows(g: Generator, d: device, s: int, v: int, dtype: dtype = float32) -> Arguments:
    return (randn(g, d, s, v, dtype=dtype),), {}
