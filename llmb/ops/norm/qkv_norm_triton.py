"""Triton kernel of `qkv_norm.py`: a program takes some heads of a token, or all where these share a norm."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import pdl_options, pdl_wait

ELEMENTS = 2048  # of a program, unless one norm has more


@triton.jit
def _qkv_norm(
    x_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, stride, eps, rows, Q: tl.constexpr, NORMED: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Rows are what shares a mean square: Q with the first weight, then others with the second, to NORMED in all."""
    pdl_wait(USE_PDL)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    offset = row[:, None] * SIZE + column[None, :]
    ptrs = x_ptr + tl.program_id(0).to(tl.int64) * stride + offset
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        q_norm = tl.load(q_norm_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        k_norm = tl.load(k_norm_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        weight = tl.where((row < Q)[:, None], q_norm, k_norm)
        inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = tl.where((row < NORMED)[:, None], x * inverse_rms * weight, x)
    tl.store(ptrs, x.to(x_ptr.dtype.element_ty), mask=mask)


def qkv_norm_triton_(
    qkv_NW: Tensor,
    heads: int,
    kv_heads: int,
    bias_W: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Launch the kernel of `qkv_norm.qkv_norm_`."""
    head_dim = qkv_NW.shape[1] // (heads + 2 * kv_heads)
    if norms is None or len(norms[0]) == len(norms[1]) == head_dim:
        normed = 0 if norms is None else heads + kv_heads
        rows = normed if bias_W is None else heads + 2 * kv_heads
        _launch(qkv_NW, bias_W, norms, eps, rows, heads, normed, head_dim)
        return
    q_NW, k_NW, v_NW = qkv_NW.split([count * head_dim for count in (heads, kv_heads, kv_heads)], dim=1)
    biases = [None] * 3 if bias_W is None else bias_W.split([x.shape[1] for x in (q_NW, k_NW, v_NW)])
    for x_NW, bias, weight in zip((q_NW, k_NW), biases, norms, strict=False):
        rows = x_NW.shape[1] // len(weight)
        _launch(x_NW, bias, (weight, weight), eps, rows, rows, rows, len(weight))
    if biases[2] is not None:
        _launch(v_NW, biases[2], None, eps, kv_heads, 0, 0, head_dim)


def _launch(
    x_NW: Tensor, bias_W: Tensor | None, norms: tuple[Tensor, Tensor] | None, eps: float, rows: int, q: int,
    normed: int, size: int,
) -> None:  # fmt: skip
    assert x_NW.stride(1) == 1, "a token's projections must be contiguous"
    block = triton.next_power_of_2(size)
    tile = max(1, min(ELEMENTS // block, triton.next_power_of_2(rows)))
    if len(x_NW) and rows:
        _qkv_norm[len(x_NW), triton.cdiv(rows, tile)](
            x_NW, bias_W, *(norms or (None, None)), x_NW.stride(0), eps, rows, Q=q, NORMED=normed, SIZE=size,
            TILE=tile, BLOCK=block, HAS_BIAS=bias_W is not None, num_warps=max(4, min(block // 1024, 16)),
            **pdl_options(len(x_NW)),
        )  # fmt: skip
