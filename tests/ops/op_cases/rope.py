"""Rotary position embedding."""

import torch
from torch import Generator, Tensor, bfloat16, device, dtype, float32

from llmb.ops.rope.mla_rope import mla_rope_keys, mla_rope_queries
from llmb.ops.rope.rope import apply_rope_out, qkv_rope_backward
from op_cases import Arguments, cases, full_size_cases, randn


def tables(g: Generator, d: device, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(tokens, pairs, generator=g) * 100
    return angle.cos().to(d), angle.sin().to(d)


@cases(apply_rope_out, (3, 2, 8), (5, 1, 6, True), (2, 17, 64), (1, 24, 10, True), tolerance=2e-6)
@cases(apply_rope_out, (4, 3, 16, False, bfloat16), (4, 3, 16, True, bfloat16), (0, 3, 32), tolerance=2**-7)
@full_size_cases(apply_rope_out, *((4097, 40, 128, inverse, bfloat16) for inverse in (False, True)), tolerance=1e-6)
@full_size_cases(apply_rope_out, (4097, 8, 128, False, bfloat16), (4097, 20, 96, True), tolerance=1e-6)
def heads(
    g: Generator, d: device, n: int, h: int, width: int, inverse: bool = False, dtype: dtype = float32
) -> Arguments:
    rows = randn(g, d, n, h + 2, width, dtype=dtype)
    out = torch.full((n, h, width), 7.0, dtype=dtype, device=d)
    return (out, rows[:, 1:-1], *tables(g, d, n, width // 2), inverse), {}  # heads inside wider rows


@cases(apply_rope_out, (3, 2, 8), (1, 1, 2), (5, 5, 64, True), (2, 20, 96), (4, 40, 16, True), tolerance=2e-6)
def over_itself(g: Generator, d: device, n: int, h: int, width: int, inverse: bool = False) -> Arguments:
    x, table = randn(g, d, n, h + 2, width)[:, 1:-1], torch.cat(tables(g, d, n, width // 2), dim=1)
    return (x, x, *table.chunk(2, dim=1), inverse), {}  # rows of the tables have a stride


# N tokens, H heads, G KV heads, head width
@cases(qkv_rope_backward, (3, 4, 2, 8), (2, 1, 1, 2), (2, 9, 3, 10), (1, 32, 8, 16), (2, 20, 4, 6), (0, 2, 1, 4),
       tolerance=2e-6)  # fmt: skip
@cases(qkv_rope_backward, (3, 5, 1, 16, bfloat16), tolerance=2**-7)
@full_size_cases(qkv_rope_backward, (4097, 32, 8, 128, bfloat16), (4097, 9, 3, 64, bfloat16), (2049, 28, 4, 96),
                 tolerance=1e-6)  # fmt: skip
def attention_gradients(
    g: Generator, d: device, n: int, h: int, groups: int, width: int, dtype: dtype = float32
) -> Arguments:
    """Gradients inside wider rows, in the orders of memory that attention kernels return, or densely."""
    dq, dk = (randn(g, d, n, heads + 2, width, dtype=dtype)[:, 1:-1] for heads in (h, groups))
    dv = randn(g, d, groups, n, width, dtype=dtype).transpose(0, 1)
    dqkv = torch.full((n, (h + 2 * groups) * width), 7.0, dtype=dtype, device=d)
    return (dqkv, dq, dk, dv, *tables(g, d, n, width // 2)), {}


@cases(qkv_rope_backward, (3, 4, 2, 8, True), (2, 9, 3, 16, False), tolerance=2**-7)
@cases(qkv_rope_backward, (2, 4, 2, 8, False, bfloat16), tolerance=0)
def chunk_gradients(
    g: Generator, d: device, n: int, h: int, groups: int, width: int, rope: bool, dtype: dtype = float32
) -> Arguments:
    """Of a chunk: those of queries in place, those of keys and values summed in fp32; with RoPE or without."""
    dqkv = randn(g, d, n, (h + 2 * groups) * width, dtype=bfloat16)
    dq = dqkv[:, : h * width].unflatten(1, (h, width))
    dk, dv = (randn(g, d, n, groups, width, dtype=dtype) for _ in range(2))
    return (dqkv, dq, dk, dv, *(tables(g, d, n, width // 2) if rope else (None, None))), {}


# B sequences, T tokens, H heads, nope channels, rope channels
@cases(mla_rope_queries, (2, 5, 3, 8, 4), (1, 1, 1, 16, 2), (1, 3, 40, 12, 10), (1, 2, 16, 128, 64), tolerance=1e-5)
@cases(mla_rope_queries, (2, 7, 16, 128, 64, bfloat16), tolerance=2**-6)  # the reference rounds products
@full_size_cases(mla_rope_queries, (2, 7, 16, 128, 64, bfloat16), tolerance=2**-7)
def queries(g: Generator, d: device, b: int, t: int, h: int, nope: int, rope: int, dtype: dtype = float32) -> Arguments:
    return (randn(g, d, b, t, h, nope + rope, dtype=dtype).requires_grad_(), *tables(g, d, t, rope // 2)), {}


@cases(
    mla_rope_keys,
    (2, 5, 3, 8, 4, 6),
    (1, 1, 1, 16, 2, 16),
    (1, 3, 40, 12, 10, 5),
    (1, 2, 16, 128, 64, 128),
    tolerance=1e-5,
)
@cases(mla_rope_keys, (2, 7, 16, 128, 64, 128, bfloat16), tolerance=2**-6)
@full_size_cases(mla_rope_keys, (2, 7, 16, 128, 64, 128, bfloat16), tolerance=2**-7)
def keys(
    g: Generator, d: device, b: int, t: int, h: int, nope: int, rope: int, value: int, dtype: dtype = float32
) -> Arguments:
    kv, key = (randn(g, d, b, t, *shape, dtype=dtype).requires_grad_() for shape in ((h, nope + value), (rope,)))
    return (kv, key, *tables(g, d, t, rope // 2), nope), {}
