"""Triton kernels of causal attention with logit softcap: forward, backward of the queries, backward of keys and values.

A logit is never above the softcap, so exponentials can be summed as they are, without a running maximum and rescaling.
That takes a softcap of 60 at most: e ** 60 is 1e26, and fp32 ends at 3e38. Logits are in units of log2, so that
exponentials are exp2, and tanh is the GPU's own: 2 ** -11 off, about as much as bf16 rounds a query or a key.

A program has one tile of queries, or of keys, and iterates over the others that it meets; those seen in full come
without a mask. With a sliding window it begins and ends at the first and the last tile that the window touches. The
backward pass computes logits twice, once for queries and once for keys: no program waits for another, and the order of
additions is fixed.

For bf16; fp32 would not fit the tiles. `bench/softcap_attention.py` measures them against flex_attention.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.online_softmax_triton import LOG2_E
from llmb.ops.attention.window_attention import window_attention
from llmb.ops.dispatch import INTERPRETED, is_dry_run
from llmb.ops.softcap.softcap_tiles import Tiles, tiles_for
from llmb.ops.tensor_layout import dense_rows

ON_CPU = tl.constexpr(INTERPRETED)


@triton.jit
def _tanh(x):
    if ON_CPU:
        return 2 * tl.sigmoid(2 * x) - 1
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _dot(a, b):
    if ON_CPU:  # the interpreter multiplies bf16 as if its bits were integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _load(ptr, row, start, count, ROWS: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):
    """Load rows of a head from `start` on, of stride `row`; zeros beyond the last."""
    rows = start + tl.arange(0, ROWS)
    offset = ptr + rows[:, None] * row + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(offset)
    return tl.load(offset, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def _store(ptr, row, value, start, count, ROWS: tl.constexpr, D: tl.constexpr):
    rows = start + tl.arange(0, ROWS)
    offset = ptr + rows[:, None] * row + tl.arange(0, D)[None, :]
    tl.store(offset, value.to(ptr.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _query_tile(M: tl.constexpr):
    """Return the first query, and all of them; the last tiles see most keys and run first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    return first, first + tl.arange(0, M)


@triton.jit
def _key_range(first, Q, T, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return where the keys begin that any query of a tile sees, where those that all see begin and end, and the end.

    Both borders are masked; without a window there is none at the beginning.
    """
    if CAUSAL:
        full_end = (T - Q + first + 1) // N * N
        end = tl.minimum(T - Q + first + M, T)
    else:
        full_end = T // N * N
        end = T
    start, full_start = 0, 0
    if WINDOW:
        start = tl.maximum(T - Q + first - WINDOW + 1, 0) // N * N
        full_start = tl.minimum(tl.cdiv(tl.maximum(T - Q + first + M - WINDOW, 0), N) * N, full_end)
    return start, full_start, full_end, end


@triton.jit
def _visible(position, key, T, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return which keys the queries at these positions see."""
    if WINDOW:
        visible = (position >= key) & (position - key < WINDOW)
    elif CAUSAL:
        visible = position >= key
    else:
        visible = key < T
    return visible


@triton.jit
def _accumulate(
    acc, exp_sum, q, k_ptr, k_row, v_ptr, v_row, start, end, position, T, tanh_scale, logit_scale,
    N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate the values of the keys from start to end, weighted by exponentials, and the sum of these."""
    for first in range(start, end, N):
        k = _load(k_ptr, k_row, first, T, N, D, EVEN)
        v = _load(v_ptr, v_row, first, T, N, D, EVEN)
        p = tl.exp2(logit_scale * _tanh(tanh_scale * _dot(q, tl.trans(k))))
        if MASKED:
            key = first + tl.arange(0, N)
            p = tl.where(_visible(position[:, None], key[None, :], T, CAUSAL, WINDOW), p, 0.0)
        exp_sum += tl.sum(p, 1)
        acc += _dot(p.to(v.dtype), v)
    return acc, exp_sum


@triton.jit
def _softcap_attention_forward(
    q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t,
    Q, T, tanh_scale, logit_scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a head's queries."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_ptr += batch * k_b + head // GROUP * k_h
    v_ptr += batch * v_b + head // GROUP * v_h
    first, rows = _query_tile(M)
    start, full_start, full_end, end = _key_range(first, Q, T, M, N, CAUSAL, WINDOW)
    position = T - Q + rows
    q = _load(q_ptr + batch * q_b + head * q_h, q_t, first, Q, M, D, EVEN)
    acc = tl.zeros([M, D], tl.float32)
    exp_sum = tl.zeros([M], tl.float32)
    if WINDOW:
        acc, exp_sum = _accumulate(
            acc, exp_sum, q, k_ptr, k_t, v_ptr, v_t, start, full_start, position, T, tanh_scale, logit_scale,
            N, D, EVEN, CAUSAL, WINDOW, MASKED=True,
        )  # fmt: skip
    acc, exp_sum = _accumulate(
        acc, exp_sum, q, k_ptr, k_t, v_ptr, v_t, full_start, full_end, position, T, tanh_scale, logit_scale,
        N, D, EVEN, CAUSAL, WINDOW, MASKED=False,
    )  # fmt: skip
    acc, exp_sum = _accumulate(
        acc, exp_sum, q, k_ptr, k_t, v_ptr, v_t, full_end, end, position, T, tanh_scale, logit_scale,
        N, D, EVEN, CAUSAL, WINDOW, MASKED=True,
    )  # fmt: skip
    _store(y_ptr + batch * y_b + head * y_h, y_t, acc / exp_sum[:, None], first, Q, M, D)
    tl.store(lse_ptr + (batch * tl.num_programs(1) + head) * Q + rows, tl.log2(exp_sum), mask=rows < Q)


@triton.jit
def _accumulate_dq(
    dq, q, dy, lse, delta, k_ptr, k_row, v_ptr, v_row, start, end, position, T, tanh_scale, logit_scale,
    N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate dq of a tile of queries over the keys from start to end."""
    for first in range(start, end, N):
        k = _load(k_ptr, k_row, first, T, N, D, EVEN)
        v = _load(v_ptr, v_row, first, T, N, D, EVEN)
        t = _tanh(tanh_scale * _dot(q, tl.trans(k)))
        p = tl.exp2(logit_scale * t - lse[:, None])
        if MASKED:
            key = first + tl.arange(0, N)
            p = tl.where(_visible(position[:, None], key[None, :], T, CAUSAL, WINDOW), p, 0.0)
        ds = p * (_dot(dy, tl.trans(v)) - delta[:, None]) * (1 - t * t)
        dq += _dot(ds.to(k.dtype), k)
    return dq


@triton.jit
def _softcap_attention_backward_dq(
    dy_ptr, y_ptr, lse_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, dq_ptr,
    dy_b, dy_h, dy_t, y_b, y_h, y_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dq_b, dq_h, dq_t,
    Q, T, tanh_scale, logit_scale, scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute dq of one tile of a head's queries; `delta` receives sum(dy * y), which dk and dv need too."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_ptr += batch * k_b + head // GROUP * k_h
    v_ptr += batch * v_b + head // GROUP * v_h
    first, rows = _query_tile(M)
    start, full_start, full_end, end = _key_range(first, Q, T, M, N, CAUSAL, WINDOW)
    position = T - Q + rows
    q = _load(q_ptr + batch * q_b + head * q_h, q_t, first, Q, M, D, EVEN)
    dy = _load(dy_ptr + batch * dy_b + head * dy_h, dy_t, first, Q, M, D, EVEN)
    y = _load(y_ptr + batch * y_b + head * y_h, y_t, first, Q, M, D, EVEN)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    offset = (batch * tl.num_programs(1) + head) * Q + rows
    tl.store(delta_ptr + offset, delta, mask=rows < Q)
    lse = tl.load(lse_ptr + offset, mask=rows < Q, other=0.0)
    dq = tl.zeros([M, D], tl.float32)
    if WINDOW:
        dq = _accumulate_dq(
            dq, q, dy, lse, delta, k_ptr, k_t, v_ptr, v_t, start, full_start, position, T, tanh_scale, logit_scale,
            N, D, EVEN, CAUSAL, WINDOW, MASKED=True,
        )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, dy, lse, delta, k_ptr, k_t, v_ptr, v_t, full_start, full_end, position, T, tanh_scale, logit_scale,
        N, D, EVEN, CAUSAL, WINDOW, MASKED=False,
    )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, dy, lse, delta, k_ptr, k_t, v_ptr, v_t, full_end, end, position, T, tanh_scale, logit_scale,
        N, D, EVEN, CAUSAL, WINDOW, MASKED=True,
    )  # fmt: skip
    _store(dq_ptr + batch * dq_b + head * dq_h, dq_t, dq * scale, first, Q, M, D)


@triton.jit
def _accumulate_dkv(
    dk, dv, k, v, q_ptr, q_row, dy_ptr, dy_row, lse_ptr, delta_ptr, start, end, key, Q, T,
    tanh_scale, logit_scale,
    M: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate dk and dv of a tile of keys over a head's queries from start to end.

    Beyond the last query dy is zero, and so is what it adds.
    """
    for first in range(start, end, M):
        rows = first + tl.arange(0, M)
        q = _load(q_ptr, q_row, first, Q, M, D, EVEN)
        dy = _load(dy_ptr, dy_row, first, Q, M, D, EVEN)
        lse = tl.load(lse_ptr + rows, mask=rows < Q, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < Q, other=0.0)
        t = _tanh(tanh_scale * _dot(k, tl.trans(q)))
        p = tl.exp2(logit_scale * t - lse[None, :])
        if MASKED:
            p = tl.where(_visible((T - Q + rows)[None, :], key[:, None], T, True, WINDOW), p, 0.0)
        dv += _dot(p.to(dy.dtype), dy)
        ds = p * (_dot(v, tl.trans(dy)) - delta[None, :]) * (1 - t * t)
        dk += _dot(ds.to(q.dtype), q)
    return dk, dv


@triton.jit
def _query_range(first, Q, T, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return where the queries begin that see any key of a tile, where those that see all of them, and the end."""
    start, full_start, end = 0, 0, Q
    if CAUSAL:
        start = tl.maximum(first - (T - Q), 0) // M * M
        full_start = tl.cdiv(tl.maximum(first + N - 1 - (T - Q), 0), M) * M
    if WINDOW:
        end = tl.minimum(first + N - 1 + WINDOW - (T - Q), Q)
    return start, full_start, end


@triton.jit
def _softcap_attention_backward_dkv(
    dy_ptr, lse_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr,
    dy_b, dy_h, dy_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    Q, T, tanh_scale, logit_scale, scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of a KV head, for all query heads that it serves; the first have most work."""
    first = tl.program_id(0) * N
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key = first + tl.arange(0, N)
    k = _load(k_ptr + batch * k_b + kv_head * k_h, k_t, first, T, N, D, EVEN)
    v = _load(v_ptr + batch * v_b + kv_head * v_h, v_t, first, T, N, D, EVEN)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    start, full_start, end = _query_range(first, Q, T, M, N, CAUSAL, WINDOW)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        queries = q_ptr + batch * q_b + head * q_h
        dys = dy_ptr + batch * dy_b + head * dy_h
        offset = (batch * tl.num_programs(1) * GROUP + head) * Q
        if WINDOW or D > 128:  # one loop: registers of the prologue of another would spill
            dk, dv = _accumulate_dkv(
                dk, dv, k, v, queries, q_t, dys, dy_t, lse_ptr + offset, delta_ptr + offset,
                start, end, key, Q, T, tanh_scale, logit_scale, M, D, EVEN, WINDOW, MASKED=CAUSAL,
            )  # fmt: skip
        else:
            if CAUSAL:
                dk, dv = _accumulate_dkv(
                    dk, dv, k, v, queries, q_t, dys, dy_t, lse_ptr + offset, delta_ptr + offset,
                    start, tl.minimum(full_start, Q), key, Q, T, tanh_scale, logit_scale, M, D, EVEN, WINDOW,
                    MASKED=True,
                )  # fmt: skip
            dk, dv = _accumulate_dkv(
                dk, dv, k, v, queries, q_t, dys, dy_t, lse_ptr + offset, delta_ptr + offset,
                full_start, Q, key, Q, T, tanh_scale, logit_scale, M, D, EVEN, WINDOW, MASKED=False,
            )  # fmt: skip
    _store(dk_ptr + batch * dk_b + kv_head * dk_h, dk_t, dk * scale, first, T, N, D)
    _store(dv_ptr + batch * dv_b + kv_head * dv_h, dv_t, dv, first, T, N, D)


class SoftcapAttention(torch.autograd.Function):
    """Autograd function of the three kernels."""

    @staticmethod
    def forward(
        ctx: Any, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, softcap: float, window: int | None
    ) -> Tensor:
        q_BHQD, k_BHTD, v_BHTD = (dense_rows(x) for x in (q_BHQD, k_BHTD, v_BHTD))
        ctx.logits = Logits(scale, softcap, window)
        y_BHQD, lse_BHQ = softcap_forward(q_BHQD, k_BHTD, v_BHTD, ctx.logits)
        ctx.save_for_backward(q_BHQD, k_BHTD, v_BHTD, y_BHQD, lse_BHQ)
        return y_BHQD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_BHQD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q_BHQD, k_BHTD, v_BHTD, y_BHQD, lse_BHQ = ctx.saved_tensors
        dy_BHQD = dense_rows(dy_BHQD)
        dq_BHQD, delta_BHQ = softcap_backward_dq(dy_BHQD, y_BHQD, lse_BHQ, q_BHQD, k_BHTD, v_BHTD, ctx.logits)
        dk_BHTD, dv_BHTD = softcap_backward_dkv(dy_BHQD, lse_BHQ, delta_BHQ, q_BHQD, k_BHTD, v_BHTD, ctx.logits)
        return dq_BHQD, dk_BHTD, dv_BHTD, None, None, None


def softcap_attention_triton(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, softcap: float, window: int | None = None
) -> Tensor:
    """Compute `softcap_attention`; a dry run takes a fused attention of the same work and memory."""
    if is_dry_run():
        if window is not None and q_BHQD.shape[2] == k_BHTD.shape[2]:
            return window_attention(q_BHQD, k_BHTD, v_BHTD, scale, window)
        return F.scaled_dot_product_attention(q_BHQD, k_BHTD, v_BHTD, is_causal=True, scale=scale, enable_gqa=True)
    return SoftcapAttention.apply(q_BHQD, k_BHTD, v_BHTD, scale, softcap, window)


class Logits(NamedTuple):
    """Logits of a call, softcap * tanh(scale * q k / softcap), and which of them count."""

    scale: float
    softcap: float
    window: int | None = None  # keys that a query sees at most, its own included
    causal: bool = True  # or else every query sees all keys


def softcap_forward(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, logits: Logits, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log2 of each query's sum of exponentials. Rows must be contiguous."""
    y_BHQD = _tokens_first(q_BHQD)
    lse_BHQ = torch.empty(q_BHQD.shape[:3], dtype=torch.float32, device=q_BHQD.device)
    tensors = (q_BHQD, k_BHTD, v_BHTD, y_BHQD, lse_BHQ)
    tiles = tiles or tiles_for(q_BHQD.shape[-1], q_BHQD.device).forward
    _launch(_softcap_attention_forward, tiles, tensors, logits, (), q_BHQD, k_BHTD)
    return y_BHQD, lse_BHQ


def softcap_backward_dq(
    dy_BHQD: Tensor, y_BHQD: Tensor, lse_BHQ: Tensor, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor,
    logits: Logits, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dq, and sum(dy * y) of each query; the log-sum-exp and y may be those of a softmax over more keys."""
    dq_BHQD, delta_BHQ = _tokens_first(q_BHQD), torch.empty_like(lse_BHQ)
    tensors = (dy_BHQD, y_BHQD, lse_BHQ, delta_BHQ, q_BHQD, k_BHTD, v_BHTD, dq_BHQD)
    tiles = tiles or tiles_for(q_BHQD.shape[-1], q_BHQD.device).backward_dq
    _launch(_softcap_attention_backward_dq, tiles, tensors, logits, (logits.scale,), q_BHQD, k_BHTD)
    return dq_BHQD, delta_BHQ


def softcap_backward_dkv(
    dy_BHQD: Tensor, lse_BHQ: Tensor, delta_BHQ: Tensor, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor,
    logits: Logits, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dk and dv."""
    dk_BHTD, dv_BHTD = _tokens_first(k_BHTD), _tokens_first(v_BHTD)
    tensors = (dy_BHQD, lse_BHQ, delta_BHQ, q_BHQD, k_BHTD, v_BHTD, dk_BHTD, dv_BHTD)
    tiles = tiles or tiles_for(q_BHQD.shape[-1], q_BHQD.device).backward_dkv
    _launch(_softcap_attention_backward_dkv, tiles, tensors, logits, (logits.scale,), q_BHQD, k_BHTD)
    return dk_BHTD, dv_BHTD


def _launch(
    kernel: Any, tiles: Tiles, tensors: Sequence[Tensor], logits: Logits, scalars: Sequence[float], q_BHQD: Tensor,
    k_BHTD: Tensor,
) -> None:  # fmt: skip
    """Launch with tensors, strides of those with heads and rows, sizes, scalars: the order of all three kernels."""
    batch, heads, queries, width = q_BHQD.shape
    kv_heads, keys = k_BHTD.shape[1:3]
    if kernel is _softcap_attention_backward_dkv:
        programs = (triton.cdiv(keys, tiles.keys), kv_heads, batch)
    else:
        programs = (triton.cdiv(queries, tiles.queries), heads, batch)
    strides = [stride for tensor in tensors if tensor.ndim == 4 for stride in tensor.stride()[:3]]
    window = logits.window if logits.window is not None and logits.window < keys else 0
    kernel[programs](
        *tensors, *strides, queries, keys, logits.scale / logits.softcap, logits.softcap * LOG2_E, *scalars,
        GROUP=heads // kv_heads, D=width, CAUSAL=logits.causal, WINDOW=window, **tiles.options(queries, keys),
    )  # fmt: skip


def _tokens_first(like_BHTD: Tensor) -> Tensor:
    """Allocate the same shape with the heads of a token contiguous, as the output projection takes them."""
    batch, heads, tokens, width = like_BHTD.shape
    return like_BHTD.new_empty(batch, tokens, heads, width).transpose(1, 2)
