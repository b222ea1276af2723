"""Triton for causal attention whose logits are squeezed to +-cap: there, back to the queries, back to keys and values.

A squeezed logit is never above the cap: powers of all of them can be added up as they are, so that no highest logit is
looked for and nothing that was added up is ever scaled again. That takes a cap of 60 at most: e ** 60 is 1e26, and fp32
ends at 3e38. Logits count in powers of two, which GPUs compute, and the squeeze is the GPU's own tanh: 2 ** -11 off,
about as much as bf16 rounds a query or a key.

A program has one tile of queries, or of keys, and goes over the others that it meets; those that it meets whole come
without a mask. The way back computes logits twice, once for queries and once for keys: no program waits for another,
and nothing is added in an order that changes.

For bf16; fp32 would not fit the tiles. `softcap_attention.py` measures them beside flex_attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.online_softmax_triton import LOG2_E
from llmb.ops.dense_rows import dense_rows
from llmb.ops.dispatch import INTERPRETED

ON_CPU = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class Tiles:
    """Of one kernel: queries and keys at once, and how a program is laid out."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self, queries: int, keys: int) -> dict[str, Any]:
        """With which the kernel is launched; even: tiles are whole, so that nothing is loaded under a mask."""
        even = queries % self.queries == 0 and keys % self.keys == 0
        return {
            "M": self.queries, "N": self.keys, "EVEN": even, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


THERE = Tiles(64, 64, 4, 3)
BACK_TO_QUERIES = Tiles(128, 64, 8, 3)
BACK_TO_KEYS = Tiles(32, 64, 4, 3)


@triton.jit
def _tanh(x):
    if ON_CPU:
        return 2 * tl.sigmoid(2 * x) - 1
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _dot(a, b):
    if ON_CPU:  # the interpreter multiplies bf16 as if its bits were whole numbers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _load(ptr, row, start, count, ROWS: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a head from `start` on, `row` numbers from one to the next; zeros beyond the last."""
    rows = start + tl.arange(0, ROWS)
    place = ptr + rows[:, None] * row + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(place)
    return tl.load(place, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def _store(ptr, row, value, start, count, ROWS: tl.constexpr, D: tl.constexpr):
    rows = start + tl.arange(0, ROWS)
    place = ptr + rows[:, None] * row + tl.arange(0, D)[None, :]
    tl.store(place, value.to(ptr.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _tile_of_queries(Q, T, M: tl.constexpr, N: tl.constexpr):
    """The first query, all of them, and up to where all of them and any of them see keys.

    The last tiles see most keys: they begin.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    whole = (T - Q + first + 1) // N * N
    return first, first + tl.arange(0, M), whole, tl.minimum(T - Q + first + M, T)


@triton.jit
def _mix(
    mixed, total, q, k_ptr, k_row, v_ptr, v_row, start, end, position, T, inner, outer,
    N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Values of the keys from start to end, each times its power, and the powers' sum."""
    for first in range(start, end, N):
        k = _load(k_ptr, k_row, first, T, N, D, EVEN)
        v = _load(v_ptr, v_row, first, T, N, D, EVEN)
        p = tl.exp2(outer * _tanh(inner * _dot(q, tl.trans(k))))
        if MASKED:
            p = tl.where(position[:, None] >= first + tl.arange(0, N)[None, :], p, 0.0)
        total += tl.sum(p, 1)
        mixed += _dot(p.to(v.dtype), v)
    return mixed, total


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, y_ptr, sums_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t,
    Q, T, inner, outer, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of a head's queries."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_ptr += batch * k_b + head // GROUP * k_h
    v_ptr += batch * v_b + head // GROUP * v_h
    first, rows, whole, end = _tile_of_queries(Q, T, M, N)
    position = T - Q + rows
    q = _load(q_ptr + batch * q_b + head * q_h, q_t, first, Q, M, D, EVEN)
    mixed = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed, total = _mix(
        mixed, total, q, k_ptr, k_t, v_ptr, v_t, 0, whole, position, T, inner, outer, N, D, EVEN, MASKED=False
    )
    mixed, total = _mix(
        mixed, total, q, k_ptr, k_t, v_ptr, v_t, whole, end, position, T, inner, outer, N, D, EVEN, MASKED=True
    )
    _store(y_ptr + batch * y_b + head * y_h, y_t, mixed / total[:, None], first, Q, M, D)
    tl.store(sums_ptr + (batch * tl.num_programs(1) + head) * Q + rows, tl.log2(total), mask=rows < Q)


@triton.jit
def _query_slopes(
    dq, q, slope, sums, dot, k_ptr, k_row, v_ptr, v_row, start, end, position, T, inner, outer,
    N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the keys from start to end add to the slopes of a tile of queries."""
    for first in range(start, end, N):
        k = _load(k_ptr, k_row, first, T, N, D, EVEN)
        v = _load(v_ptr, v_row, first, T, N, D, EVEN)
        t = _tanh(inner * _dot(q, tl.trans(k)))
        p = tl.exp2(outer * t - sums[:, None])
        if MASKED:
            p = tl.where(position[:, None] >= first + tl.arange(0, N)[None, :], p, 0.0)
        ds = p * (_dot(slope, tl.trans(v)) - dot[:, None]) * (1 - t * t)
        dq += _dot(ds.to(k.dtype), k)
    return dq


@triton.jit
def _back_to_queries(
    slope_ptr, y_ptr, sums_ptr, dot_ptr, q_ptr, k_ptr, v_ptr, dq_ptr,
    slope_b, slope_h, slope_t, y_b, y_h, y_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dq_b, dq_h, dq_t,
    Q, T, inner, outer, scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of a head's queries; `dot` receives slope * y of each, which the way back to keys needs too."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_ptr += batch * k_b + head // GROUP * k_h
    v_ptr += batch * v_b + head // GROUP * v_h
    first, rows, whole, end = _tile_of_queries(Q, T, M, N)
    position = T - Q + rows
    q = _load(q_ptr + batch * q_b + head * q_h, q_t, first, Q, M, D, EVEN)
    slope = _load(slope_ptr + batch * slope_b + head * slope_h, slope_t, first, Q, M, D, EVEN)
    y = _load(y_ptr + batch * y_b + head * y_h, y_t, first, Q, M, D, EVEN)
    dot = tl.sum(slope.to(tl.float32) * y.to(tl.float32), 1)
    place = (batch * tl.num_programs(1) + head) * Q + rows
    tl.store(dot_ptr + place, dot, mask=rows < Q)
    sums = tl.load(sums_ptr + place, mask=rows < Q, other=0.0)
    dq = tl.zeros([M, D], tl.float32)
    dq = _query_slopes(
        dq, q, slope, sums, dot, k_ptr, k_t, v_ptr, v_t, 0, whole, position, T, inner, outer, N, D, EVEN, MASKED=False
    )
    dq = _query_slopes(
        dq, q, slope, sums, dot, k_ptr, k_t, v_ptr, v_t, whole, end, position, T, inner, outer, N, D, EVEN, MASKED=True
    )
    _store(dq_ptr + batch * dq_b + head * dq_h, dq_t, dq * scale, first, Q, M, D)


@triton.jit
def _key_slopes(
    dk, dv, k, v, q_ptr, q_row, slope_ptr, slope_row, sums_ptr, dot_ptr, start, end, key, before, Q, inner, outer,
    M: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a head's queries from start to end add to the slopes of a tile of keys and values.

    Beyond the last query slopes are zero, and so is what they add.
    """
    for first in range(start, end, M):
        rows = first + tl.arange(0, M)
        q = _load(q_ptr, q_row, first, Q, M, D, EVEN)
        slope = _load(slope_ptr, slope_row, first, Q, M, D, EVEN)
        sums = tl.load(sums_ptr + rows, mask=rows < Q, other=0.0)
        dot = tl.load(dot_ptr + rows, mask=rows < Q, other=0.0)
        t = _tanh(inner * _dot(k, tl.trans(q)))
        p = tl.exp2(outer * t - sums[None, :])
        if MASKED:
            p = tl.where((before + rows)[None, :] >= key[:, None], p, 0.0)
        dv += _dot(p.to(slope.dtype), slope)
        ds = p * (_dot(v, tl.trans(slope)) - dot[None, :]) * (1 - t * t)
        dk += _dot(ds.to(q.dtype), q)
    return dk, dv


@triton.jit
def _back_to_keys(
    slope_ptr, sums_ptr, dot_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr,
    slope_b, slope_h, slope_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    Q, T, inner, outer, scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of a head's keys, for all heads of queries that it serves. The first are seen by most: they begin."""
    first = tl.program_id(0) * N
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key, before = first + tl.arange(0, N), T - Q
    k = _load(k_ptr + batch * k_b + kv_head * k_h, k_t, first, T, N, D, EVEN)
    v = _load(v_ptr + batch * v_b + kv_head * v_h, v_t, first, T, N, D, EVEN)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    start = tl.maximum(first - before, 0) // M * M  # the first tile of queries that sees any of the keys
    whole = tl.cdiv(tl.maximum(first + N - 1 - before, 0), M) * M  # from here on they see all of them
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        queries = q_ptr + batch * q_b + head * q_h
        slopes = slope_ptr + batch * slope_b + head * slope_h
        place = (batch * tl.num_programs(1) * GROUP + head) * Q
        dk, dv = _key_slopes(
            dk, dv, k, v, queries, q_t, slopes, slope_t, sums_ptr + place, dot_ptr + place,
            start, tl.minimum(whole, Q), key, before, Q, inner, outer, M, D, EVEN, MASKED=True,
        )  # fmt: skip
        dk, dv = _key_slopes(
            dk, dv, k, v, queries, q_t, slopes, slope_t, sums_ptr + place, dot_ptr + place,
            whole, Q, key, before, Q, inner, outer, M, D, EVEN, MASKED=False,
        )  # fmt: skip
    _store(dk_ptr + batch * dk_b + kv_head * dk_h, dk_t, dk * scale, first, T, N, D)
    _store(dv_ptr + batch * dv_b + kv_head * dv_h, dv_t, dv, first, T, N, D)


class CappedAttention(torch.autograd.Function):
    """As `capped_attention.capped_attention_reference`."""

    @staticmethod
    def forward(ctx: Any, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, cap: float) -> Tensor:
        q_BHQD, k_BHTD, v_BHTD = (dense_rows(x) for x in (q_BHQD, k_BHTD, v_BHTD))
        y_BHQD, sums_BHQ = attend(q_BHQD, k_BHTD, v_BHTD, scale, cap)
        ctx.save_for_backward(q_BHQD, k_BHTD, v_BHTD, y_BHQD, sums_BHQ)
        ctx.scale, ctx.cap = scale, cap
        return y_BHQD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope_BHQD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BHQD, k_BHTD, v_BHTD, y_BHQD, sums_BHQ = ctx.saved_tensors
        slope_BHQD, scale, cap = dense_rows(slope_BHQD), ctx.scale, ctx.cap
        dq_BHQD, dot_BHQ = back_to_queries(slope_BHQD, y_BHQD, sums_BHQ, q_BHQD, k_BHTD, v_BHTD, scale, cap)
        dk_BHTD, dv_BHTD = back_to_keys(slope_BHQD, sums_BHQ, dot_BHQ, q_BHQD, k_BHTD, v_BHTD, scale, cap)
        return dq_BHQD, dk_BHTD, dv_BHTD, None, None


def attend(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, cap: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """What queries see, and of each the logarithm to base 2 of its powers' sum. Numbers of a row lie side by side."""
    y_BHQD = _tokens_first(q_BHQD)
    sums_BHQ = torch.empty(q_BHQD.shape[:3], dtype=torch.float32, device=q_BHQD.device)
    tensors = (q_BHQD, k_BHTD, v_BHTD, y_BHQD, sums_BHQ)
    _launch(_attend, tiles or THERE, tensors, (scale / cap, cap * LOG2_E), q_BHQD, k_BHTD)
    return y_BHQD, sums_BHQ


def back_to_queries(
    slope_BHQD: Tensor, y_BHQD: Tensor, sums_BHQ: Tensor, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor,
    scale: float, cap: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Their slopes, and slope * y of each."""
    dq_BHQD, dot_BHQ = _tokens_first(q_BHQD), torch.empty_like(sums_BHQ)
    tensors = (slope_BHQD, y_BHQD, sums_BHQ, dot_BHQ, q_BHQD, k_BHTD, v_BHTD, dq_BHQD)
    _launch(_back_to_queries, tiles or BACK_TO_QUERIES, tensors, (scale / cap, cap * LOG2_E, scale), q_BHQD, k_BHTD)
    return dq_BHQD, dot_BHQ


def back_to_keys(
    slope_BHQD: Tensor, sums_BHQ: Tensor, dot_BHQ: Tensor, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor,
    scale: float, cap: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The slopes of keys and of values."""
    dk_BHTD, dv_BHTD = _tokens_first(k_BHTD), _tokens_first(v_BHTD)
    tensors = (slope_BHQD, sums_BHQ, dot_BHQ, q_BHQD, k_BHTD, v_BHTD, dk_BHTD, dv_BHTD)
    _launch(_back_to_keys, tiles or BACK_TO_KEYS, tensors, (scale / cap, cap * LOG2_E, scale), q_BHQD, k_BHTD)
    return dk_BHTD, dv_BHTD


def _launch(
    kernel: Any, tiles: Tiles, tensors: Sequence[Tensor], numbers: Sequence[float], q_BHQD: Tensor, k_BHTD: Tensor
) -> None:
    """Tensors, strides of those that have heads and rows, sizes, numbers: the order that all three take them in."""
    batch, heads, queries, width = q_BHQD.shape
    kv_heads, keys = k_BHTD.shape[1:3]
    if kernel is _back_to_keys:
        programs = (triton.cdiv(keys, tiles.keys), kv_heads, batch)
    else:
        programs = (triton.cdiv(queries, tiles.queries), heads, batch)
    strides = [stride for tensor in tensors if tensor.ndim == 4 for stride in tensor.stride()[:3]]
    kernel[programs](
        *tensors, *strides, queries, keys, *numbers,
        GROUP=heads // kv_heads, D=width, **tiles.options(queries, keys),
    )  # fmt: skip


def _tokens_first(like_BHTD: Tensor) -> Tensor:
    """New and of the same shape; heads of a token lie side by side, as the product behind attention takes them."""
    batch, heads, tokens, width = like_BHTD.shape
    return like_BHTD.new_empty(batch, tokens, heads, width).transpose(1, 2)
