"""Triton for the norm in 8 bits.

Rows alone are made by one program each, which reads its row once. Columns need tiles of many rows, none of which is a
whole one: a first kernel finds the size of each row, and a second reads the rows again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.norm.rms_norm_triton import load_row
from llmb.ops.quant.fp8_quant import Gauge
from llmb.ops.quant.fp8_quant_triton import (
    CELLS,
    CHANNELS,
    QUADS,
    WARPS,
    as_bits,
    as_words,
    eight_bits,
    inverse_of,
    is_e5m2,
    load_fourth,
    note,
    row_of,
    store_forms,
    tile_of,
    tiles,
)

PER_THREAD = 16  # numbers of a row: two loads of 16 bytes in bf16


@triton.jit(do_not_specialize_on_alignment=CELLS)
def _normed_row(
    x_ptr, weight_ptr, scale_ptr, amax_ptr, rows_ptr, x_row, rows_row, eps,
    C: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, WIDE)
    x = load_row(x_ptr, x_row, C, WIDE)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x) / C + eps) * weight
    note(amax_ptr, tl.abs(normed))
    if ROWS:
        values = eight_bits(normed, inverse_of(scale_ptr), E5M2)
        tl.store(rows_ptr + tl.program_id(0).to(tl.int64) * rows_row + c, values, mask=c < C)


@triton.jit
def _inverse_size(x_ptr, out_ptr, x_row, eps, C: tl.constexpr, WIDE: tl.constexpr):
    x = load_row(x_ptr, x_row, C, WIDE)
    tl.store(out_ptr + tl.program_id(0), tl.rsqrt(tl.sum(x * x) / C + eps))


@triton.jit
def _normed_fourth(
    x_ptr, weight, sizes_ptr, x_row, token, channel, n, K,
    FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    x = load_fourth(x_ptr, x_row, token, channel, n, K, FOURTH, QUADS, CHANNELS)
    t = token + 4 * tl.arange(0, QUADS) + FOURTH
    inverse_size = tl.load(sizes_ptr + t, mask=t < n, other=0.0)
    return x * inverse_size[:, None] * weight


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=CELLS)
def _normed_tile(
    x_ptr, weight_ptr, sizes_ptr, scale_ptr, amax_ptr, rows_ptr, columns_ptr, x_row, rows_row, columns_row, n, K,
    ROWS: tl.constexpr, E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel = tile_of(K, QUADS, CHANNELS)
    c = channel + tl.arange(0, CHANNELS)
    weight = tl.load(weight_ptr + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
    x0 = _normed_fourth(x_ptr, weight, sizes_ptr, x_row, token, channel, n, K, 0, QUADS, CHANNELS)
    x1 = _normed_fourth(x_ptr, weight, sizes_ptr, x_row, token, channel, n, K, 1, QUADS, CHANNELS)
    x2 = _normed_fourth(x_ptr, weight, sizes_ptr, x_row, token, channel, n, K, 2, QUADS, CHANNELS)
    x3 = _normed_fourth(x_ptr, weight, sizes_ptr, x_row, token, channel, n, K, 3, QUADS, CHANNELS)
    store_forms(
        x0, x1, x2, x3, scale_ptr, amax_ptr, rows_ptr, columns_ptr, rows_row, columns_row, token, channel, n, K,
        ROWS, True, E5M2, QUADS, CHANNELS,
    )  # fmt: skip


def rms_norm_fp8_triton(
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    gauge: Gauge,
    rows_NC: Tensor | None = None,
    columns_CP: Tensor | None = None,
) -> None:
    """As `rms_norm_fp8.rms_norm_fp8_reference`."""
    assert x_NC.stride(1) == 1, "channels of a row lie side by side"
    n, c = x_NC.shape
    if not n:
        return
    words, e5m2, amax = as_words(columns_CP, n), is_e5m2(rows_NC, columns_CP), as_bits(gauge.amax)
    wide = triton.next_power_of_2(c)
    warps = min(max(wide // (32 * PER_THREAD), 1), 16)
    if words is None:
        _normed_row[(n,)](
            x_NC, weight_C, gauge.scale, amax, rows_NC, x_NC.stride(0), row_of(rows_NC), eps,
            C=c, WIDE=wide, ROWS=rows_NC is not None, E5M2=e5m2, num_warps=warps,
        )  # fmt: skip
        return
    sizes_N = torch.empty(n, dtype=torch.float32, device=x_NC.device)
    _inverse_size[(n,)](x_NC, sizes_N, x_NC.stride(0), eps, C=c, WIDE=wide, num_warps=warps)
    _normed_tile[(tiles(n, c, QUADS, CHANNELS),)](
        x_NC, weight_C, sizes_N, gauge.scale, amax, rows_NC, words,
        x_NC.stride(0), row_of(rows_NC), words.stride(0), n, c,
        ROWS=rows_NC is not None, E5M2=e5m2, QUADS=QUADS, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
