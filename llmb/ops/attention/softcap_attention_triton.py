"""Triton kernels of causal attention with logit softcap: forward, backward of the queries, backward of keys and values.

A logit is never above the softcap, so exponentials can be summed as they are, without a running maximum and rescaling.
That takes a softcap of 60 at most: e ** 60 is 1e26, and fp32 ends at 3e38. Logits are in units of log2, so that
exponentials are exp2, and tanh is the GPU's own: 2 ** -11 off, about as much as bf16 rounds a query or a key.

A program has one tile of queries, or of keys, and iterates over the others that it meets; those seen in full come
without a mask. The backward pass computes logits twice, once for queries and once for keys: no program waits for
another, and the order of additions is fixed.

For bf16; fp32 would not fit the tiles. `bench/softcap_attention.py` measures them against flex_attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.attention.online_softmax_triton import LOG2_E
from llmb.ops.dispatch import INTERPRETED, is_dry_run
from llmb.ops.tensor_layout import dense_rows

ON_CPU = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class Tiles:
    """Tile of queries and keys of one kernel, and its warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self, queries: int, keys: int) -> dict[str, Any]:
        """Return launch options; EVEN: all tiles are full, so that nothing is loaded under a mask."""
        even = queries % self.queries == 0 and keys % self.keys == 0
        return {
            "M": self.queries, "N": self.keys, "EVEN": even, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


FORWARD = Tiles(64, 64, 4, 3)
BACKWARD_DQ = Tiles(128, 64, 8, 3)
BACKWARD_DKV = Tiles(32, 64, 4, 3)


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
def _query_tile(Q, T, M: tl.constexpr, N: tl.constexpr):
    """Return the first query, all of them, and up to where all of them and any of them see keys.

    The last tiles see most keys and run first.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    full_end = (T - Q + first + 1) // N * N
    return first, first + tl.arange(0, M), full_end, tl.minimum(T - Q + first + M, T)


@triton.jit
def _accumulate(
    acc, exp_sum, q, k_ptr, k_row, v_ptr, v_row, start, end, position, T, tanh_scale, logit_scale,
    N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate the values of the keys from start to end, weighted by exponentials, and the sum of these."""
    for first in range(start, end, N):
        k = _load(k_ptr, k_row, first, T, N, D, EVEN)
        v = _load(v_ptr, v_row, first, T, N, D, EVEN)
        p = tl.exp2(logit_scale * _tanh(tanh_scale * _dot(q, tl.trans(k))))
        if MASKED:
            p = tl.where(position[:, None] >= first + tl.arange(0, N)[None, :], p, 0.0)
        exp_sum += tl.sum(p, 1)
        acc += _dot(p.to(v.dtype), v)
    return acc, exp_sum


@triton.jit
def _softcap_attention_forward(
    q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t,
    Q, T, tanh_scale, logit_scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a head's queries."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_ptr += batch * k_b + head // GROUP * k_h
    v_ptr += batch * v_b + head // GROUP * v_h
    first, rows, full_end, end = _query_tile(Q, T, M, N)
    position = T - Q + rows
    q = _load(q_ptr + batch * q_b + head * q_h, q_t, first, Q, M, D, EVEN)
    acc = tl.zeros([M, D], tl.float32)
    exp_sum = tl.zeros([M], tl.float32)
    acc, exp_sum = _accumulate(
        acc, exp_sum, q, k_ptr, k_t, v_ptr, v_t, 0, full_end, position, T, tanh_scale, logit_scale, N, D, EVEN,
        MASKED=False,
    )  # fmt: skip
    acc, exp_sum = _accumulate(
        acc, exp_sum, q, k_ptr, k_t, v_ptr, v_t, full_end, end, position, T, tanh_scale, logit_scale, N, D, EVEN,
        MASKED=True,
    )  # fmt: skip
    _store(y_ptr + batch * y_b + head * y_h, y_t, acc / exp_sum[:, None], first, Q, M, D)
    tl.store(lse_ptr + (batch * tl.num_programs(1) + head) * Q + rows, tl.log2(exp_sum), mask=rows < Q)


@triton.jit
def _accumulate_dq(
    dq, q, dy, lse, delta, k_ptr, k_row, v_ptr, v_row, start, end, position, T, tanh_scale, logit_scale,
    N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate dq of a tile of queries over the keys from start to end."""
    for first in range(start, end, N):
        k = _load(k_ptr, k_row, first, T, N, D, EVEN)
        v = _load(v_ptr, v_row, first, T, N, D, EVEN)
        t = _tanh(tanh_scale * _dot(q, tl.trans(k)))
        p = tl.exp2(logit_scale * t - lse[:, None])
        if MASKED:
            p = tl.where(position[:, None] >= first + tl.arange(0, N)[None, :], p, 0.0)
        ds = p * (_dot(dy, tl.trans(v)) - delta[:, None]) * (1 - t * t)
        dq += _dot(ds.to(k.dtype), k)
    return dq


@triton.jit
def _softcap_attention_backward_dq(
    dy_ptr, y_ptr, lse_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, dq_ptr,
    dy_b, dy_h, dy_t, y_b, y_h, y_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dq_b, dq_h, dq_t,
    Q, T, tanh_scale, logit_scale, scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute dq of one tile of a head's queries; `delta` receives sum(dy * y), which dk and dv need too."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_ptr += batch * k_b + head // GROUP * k_h
    v_ptr += batch * v_b + head // GROUP * v_h
    first, rows, full_end, end = _query_tile(Q, T, M, N)
    position = T - Q + rows
    q = _load(q_ptr + batch * q_b + head * q_h, q_t, first, Q, M, D, EVEN)
    dy = _load(dy_ptr + batch * dy_b + head * dy_h, dy_t, first, Q, M, D, EVEN)
    y = _load(y_ptr + batch * y_b + head * y_h, y_t, first, Q, M, D, EVEN)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    offset = (batch * tl.num_programs(1) + head) * Q + rows
    tl.store(delta_ptr + offset, delta, mask=rows < Q)
    lse = tl.load(lse_ptr + offset, mask=rows < Q, other=0.0)
    dq = tl.zeros([M, D], tl.float32)
    dq = _accumulate_dq(
        dq, q, dy, lse, delta, k_ptr, k_t, v_ptr, v_t, 0, full_end, position, T, tanh_scale, logit_scale, N, D, EVEN,
        MASKED=False,
    )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, dy, lse, delta, k_ptr, k_t, v_ptr, v_t, full_end, end, position, T, tanh_scale, logit_scale, N, D, EVEN,
        MASKED=True,
    )  # fmt: skip
    _store(dq_ptr + batch * dq_b + head * dq_h, dq_t, dq * scale, first, Q, M, D)


@triton.jit
def _accumulate_dkv(
    dk, dv, k, v, q_ptr, q_row, dy_ptr, dy_row, lse_ptr, delta_ptr, start, end, key, context, Q,
    tanh_scale, logit_scale,
    M: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
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
            p = tl.where((context + rows)[None, :] >= key[:, None], p, 0.0)
        dv += _dot(p.to(dy.dtype), dy)
        ds = p * (_dot(v, tl.trans(dy)) - delta[None, :]) * (1 - t * t)
        dk += _dot(ds.to(q.dtype), q)
    return dk, dv


@triton.jit
def _softcap_attention_backward_dkv(
    dy_ptr, lse_ptr, delta_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr,
    dy_b, dy_h, dy_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    Q, T, tanh_scale, logit_scale, scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of a KV head, for all query heads that it serves; the first have most work."""
    first = tl.program_id(0) * N
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key, context = first + tl.arange(0, N), T - Q
    k = _load(k_ptr + batch * k_b + kv_head * k_h, k_t, first, T, N, D, EVEN)
    v = _load(v_ptr + batch * v_b + kv_head * v_h, v_t, first, T, N, D, EVEN)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    start = tl.maximum(first - context, 0) // M * M  # the first tile of queries that sees any of the keys
    full_start = tl.cdiv(tl.maximum(first + N - 1 - context, 0), M) * M  # from here on they see all of them
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        queries = q_ptr + batch * q_b + head * q_h
        dys = dy_ptr + batch * dy_b + head * dy_h
        offset = (batch * tl.num_programs(1) * GROUP + head) * Q
        dk, dv = _accumulate_dkv(
            dk, dv, k, v, queries, q_t, dys, dy_t, lse_ptr + offset, delta_ptr + offset,
            start, tl.minimum(full_start, Q), key, context, Q, tanh_scale, logit_scale, M, D, EVEN, MASKED=True,
        )  # fmt: skip
        dk, dv = _accumulate_dkv(
            dk, dv, k, v, queries, q_t, dys, dy_t, lse_ptr + offset, delta_ptr + offset,
            full_start, Q, key, context, Q, tanh_scale, logit_scale, M, D, EVEN, MASKED=False,
        )  # fmt: skip
    _store(dk_ptr + batch * dk_b + kv_head * dk_h, dk_t, dk * scale, first, T, N, D)
    _store(dv_ptr + batch * dv_b + kv_head * dv_h, dv_t, dv, first, T, N, D)


class SoftcapAttention(torch.autograd.Function):
    """Autograd function of the three kernels."""

    @staticmethod
    def forward(ctx: Any, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, softcap: float) -> Tensor:
        q_BHQD, k_BHTD, v_BHTD = (dense_rows(x) for x in (q_BHQD, k_BHTD, v_BHTD))
        y_BHQD, lse_BHQ = softcap_forward(q_BHQD, k_BHTD, v_BHTD, scale, softcap)
        ctx.save_for_backward(q_BHQD, k_BHTD, v_BHTD, y_BHQD, lse_BHQ)
        ctx.scale, ctx.softcap = scale, softcap
        return y_BHQD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_BHQD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BHQD, k_BHTD, v_BHTD, y_BHQD, lse_BHQ = ctx.saved_tensors
        dy_BHQD, scale, softcap = dense_rows(dy_BHQD), ctx.scale, ctx.softcap
        dq_BHQD, delta_BHQ = softcap_backward_dq(dy_BHQD, y_BHQD, lse_BHQ, q_BHQD, k_BHTD, v_BHTD, scale, softcap)
        dk_BHTD, dv_BHTD = softcap_backward_dkv(dy_BHQD, lse_BHQ, delta_BHQ, q_BHQD, k_BHTD, v_BHTD, scale, softcap)
        return dq_BHQD, dk_BHTD, dv_BHTD, None, None


def softcap_attention_triton(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, softcap: float, window: int | None = None
) -> Tensor:
    """Compute `softcap_attention`; a dry run takes a fused attention of the same work and memory."""
    if is_dry_run():
        return F.scaled_dot_product_attention(q_BHQD, k_BHTD, v_BHTD, is_causal=True, scale=scale, enable_gqa=True)
    assert window is None, "the kernels have no window"
    return SoftcapAttention.apply(q_BHQD, k_BHTD, v_BHTD, scale, softcap)


def softcap_forward(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log2 of each query's sum of exponentials. Rows must be contiguous."""
    y_BHQD = _tokens_first(q_BHQD)
    lse_BHQ = torch.empty(q_BHQD.shape[:3], dtype=torch.float32, device=q_BHQD.device)
    tensors = (q_BHQD, k_BHTD, v_BHTD, y_BHQD, lse_BHQ)
    _launch(_softcap_attention_forward, FORWARD, tensors, (scale / softcap, softcap * LOG2_E), q_BHQD, k_BHTD)
    return y_BHQD, lse_BHQ


def softcap_backward_dq(
    dy_BHQD: Tensor, y_BHQD: Tensor, lse_BHQ: Tensor, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dq, and sum(dy * y) of each query."""
    dq_BHQD, delta_BHQ = _tokens_first(q_BHQD), torch.empty_like(lse_BHQ)
    tensors = (dy_BHQD, y_BHQD, lse_BHQ, delta_BHQ, q_BHQD, k_BHTD, v_BHTD, dq_BHQD)
    scalars = (scale / softcap, softcap * LOG2_E, scale)
    _launch(_softcap_attention_backward_dq, BACKWARD_DQ, tensors, scalars, q_BHQD, k_BHTD)
    return dq_BHQD, delta_BHQ


def softcap_backward_dkv(
    dy_BHQD: Tensor, lse_BHQ: Tensor, delta_BHQ: Tensor, q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dk and dv."""
    dk_BHTD, dv_BHTD = _tokens_first(k_BHTD), _tokens_first(v_BHTD)
    tensors = (dy_BHQD, lse_BHQ, delta_BHQ, q_BHQD, k_BHTD, v_BHTD, dk_BHTD, dv_BHTD)
    scalars = (scale / softcap, softcap * LOG2_E, scale)
    _launch(_softcap_attention_backward_dkv, BACKWARD_DKV, tensors, scalars, q_BHQD, k_BHTD)
    return dk_BHTD, dv_BHTD


def _launch(
    kernel: Any, tiles: Tiles, tensors: Sequence[Tensor], scalars: Sequence[float], q_BHQD: Tensor, k_BHTD: Tensor
) -> None:
    """Launch with tensors, strides of those with heads and rows, sizes, scalars: the order of all three kernels."""
    batch, heads, queries, width = q_BHQD.shape
    kv_heads, keys = k_BHTD.shape[1:3]
    if kernel is _softcap_attention_backward_dkv:
        programs = (triton.cdiv(keys, tiles.keys), kv_heads, batch)
    else:
        programs = (triton.cdiv(queries, tiles.queries), heads, batch)
    strides = [stride for tensor in tensors if tensor.ndim == 4 for stride in tensor.stride()[:3]]
    kernel[programs](
        *tensors, *strides, queries, keys, *scalars,
        GROUP=heads // kv_heads, D=width, **tiles.options(queries, keys),
    )  # fmt: skip


def _tokens_first(like_BHTD: Tensor) -> Tensor:
    """Allocate the same shape with the heads of a token contiguous, as the output projection takes them."""
    batch, heads, tokens, width = like_BHTD.shape
    return like_BHTD.new_empty(batch, tokens, heads, width).transpose(1, 2)
