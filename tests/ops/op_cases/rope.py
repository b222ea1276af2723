"""Rotary position embedding."""

import torch
from torch import Generator, Tensor, bfloat16, device, dtype, float32

from llmb.ops.rope.mla_rope import mla_rope_keys, mla_rope_queries
from llmb.ops.rope.rope import apply_rope_out
from op_cases import Arguments, cases, randn


def tables(g: Generator, d: device, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(tokens, pairs, generator=g) * 100
    return angle.cos().to(d), angle.sin().to(d)


@cases(apply_rope_out, (3, 2, 8), (5, 1, 6, True), (2, 17, 64), (1, 24, 10, True), tolerance=2e-6)
@cases(apply_rope_out, (4, 3, 16, False, bfloat16), (4, 3, 16, True, bfloat16), tolerance=2**-7)
def heads(
    g: Generator, d: device, n: int, h: int, width: int, inverse: bool = False, dtype: dtype = float32
) -> Arguments:
    rows = randn(g, d, n, h + 2, width, dtype=dtype)
    out = torch.full((n, h, width), 7.0, dtype=dtype, device=d)
    return (out, rows[:, 1:-1], *tables(g, d, n, width // 2), inverse), {}  # heads inside wider rows


@cases(apply_rope_out, (3, 2, 8), tolerance=2e-6)
def over_itself(g: Generator, d: device, n: int, h: int, width: int) -> Arguments:
    x = randn(g, d, n, h, width)
    return (x, x, *tables(g, d, n, width // 2)), {}


# B sequences, T tokens, H heads, nope channels, rope channels
@cases(mla_rope_queries, (2, 5, 3, 8, 4), (1, 1, 1, 16, 2), (1, 3, 40, 12, 10), (1, 2, 16, 128, 64), tolerance=1e-5)
def queries(g: Generator, d: device, b: int, t: int, h: int, nope: int, rope: int) -> Arguments:
    return (randn(g, d, b, t, h, nope + rope).requires_grad_(), *tables(g, d, t, rope // 2)), {}


@cases(
    mla_rope_keys,
    (2, 5, 3, 8, 4, 6),
    (1, 1, 1, 16, 2, 16),
    (1, 3, 40, 12, 10, 5),
    (1, 2, 16, 128, 64, 128),
    tolerance=1e-5,
)
def keys(g: Generator, d: device, b: int, t: int, h: int, nope: int, rope: int, value: int) -> Arguments:
    kv, key = randn(g, d, b, t, h, nope + value).requires_grad_(), randn(g, d, b, t, rope).requires_grad_()
    return (kv, key, *tables(g, d, t, rope // 2), nope), {}
