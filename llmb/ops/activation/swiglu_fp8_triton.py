"""Triton for the gated activation in 8 bits and its way back: one program takes one tile of channels and tokens.

The way back writes five tiles of 8 bits for the three of 16 that it reads. It takes shorter tiles, so that all fit into
registers, and several of them one behind the other: while one is worked on, the next are copied to shared memory. The
others would only do more for it: at the clock that a chip short of power sustains, instructions bound them.
"""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.gemm.fp8_linear import E5M2
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import Gauge
from llmb.ops.quant.fp8_quant_triton import (
    CELLS,
    CHANNELS,
    ON_CPU,
    QUADS,
    WARPS,
    as_bits,
    as_words,
    is_e5m2,
    larger,
    load_fourth,
    magnitude_of,
    note,
    row_of,
    store_columns,
    store_forms,
    store_rows,
    tile_of,
    tiles,
)

BACKWARD_QUADS, BACKWARD_TILES, STAGES = 16, 4, 3  # 64 tokens of a tile, tiles of a program, those under way
BACKWARD_CELLS = tuple(f"{tensor}_{cell}" for tensor in ("slope", "act") for cell in CELLS)


@triton.jit
def _sigmoid(x):
    """To the last bits of fp32, of which 8 bits see nothing."""
    if ON_CPU:
        return tl.sigmoid(x)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"  # 2 ** (-x / log(2))
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _act_fourth(h_ptr, h_row, token, channel, n, F, FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr):
    gate = load_fourth(h_ptr, h_row, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    up = load_fourth(h_ptr + F, h_row, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    return gate * _sigmoid(gate) * up


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=CELLS)
def _swiglu_fp8(
    h_ptr, scale_ptr, amax_ptr, rows_ptr, columns_ptr, h_row, rows_row, columns_row, n, F,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel = tile_of(F, QUADS, CHANNELS)
    x0 = _act_fourth(h_ptr, h_row, token, channel, n, F, 0, QUADS, CHANNELS)
    x1 = _act_fourth(h_ptr, h_row, token, channel, n, F, 1, QUADS, CHANNELS)
    x2 = _act_fourth(h_ptr, h_row, token, channel, n, F, 2, QUADS, CHANNELS)
    x3 = _act_fourth(h_ptr, h_row, token, channel, n, F, 3, QUADS, CHANNELS)
    store_forms(
        x0, x1, x2, x3, scale_ptr, amax_ptr, rows_ptr, columns_ptr, rows_row, columns_row, token, channel, n, F,
        ROWS, COLUMNS, E5M2, QUADS, CHANNELS,
    )  # fmt: skip


@triton.jit
def _slopes_fourth(
    dact_ptr, h_ptr, dact_row, h_row, token, channel, n, F,
    FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The slopes of gate and up, and the activation."""
    gate = load_fourth(h_ptr, h_row, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    up = load_fourth(h_ptr + F, h_row, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    dact = load_fourth(dact_ptr, dact_row, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    share = _sigmoid(gate)
    opened = gate * share
    return dact * up * share * (1 + gate * (1 - share)), dact * opened, opened * up


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=BACKWARD_CELLS)
def _swiglu_backward_fp8(
    dact_ptr, h_ptr, slope_scale_ptr, slope_amax_ptr, slope_rows_ptr, slope_columns_ptr, act_scale_ptr, act_amax_ptr,
    act_columns_ptr, dact_row, h_row, rows_row, columns_row, n, F,
    WRITES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    first, channel = tile_of(F, TILES * QUADS, CHANNELS)
    slope, act = slope_scale_ptr, act_scale_ptr
    slopes, acts = tl.zeros((QUADS, CHANNELS), tl.float32), tl.zeros((QUADS, CHANNELS), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        token = first + tile * (4 * QUADS)
        g0, u0, a0 = _slopes_fourth(dact_ptr, h_ptr, dact_row, h_row, token, channel, n, F, 0, QUADS, CHANNELS)
        g1, u1, a1 = _slopes_fourth(dact_ptr, h_ptr, dact_row, h_row, token, channel, n, F, 1, QUADS, CHANNELS)
        g2, u2, a2 = _slopes_fourth(dact_ptr, h_ptr, dact_row, h_row, token, channel, n, F, 2, QUADS, CHANNELS)
        g3, u3, a3 = _slopes_fourth(dact_ptr, h_ptr, dact_row, h_row, token, channel, n, F, 3, QUADS, CHANNELS)
        slopes = larger(slopes, larger(magnitude_of(g0, g1, g2, g3), magnitude_of(u0, u1, u2, u3)))
        acts = larger(acts, magnitude_of(a0, a1, a2, a3))
        if WRITES:
            up_rows_ptr, up_columns_ptr = slope_rows_ptr + F, slope_columns_ptr + tl.cast(F, tl.int64) * columns_row
            store_rows(g0, g1, g2, g3, slope, slope_rows_ptr, rows_row, token, channel, n, F, True, QUADS, CHANNELS)
            store_rows(u0, u1, u2, u3, slope, up_rows_ptr, rows_row, token, channel, n, F, True, QUADS, CHANNELS)
            store_columns(
                g0, g1, g2, g3, slope, slope_columns_ptr, columns_row, token, channel, F, True, QUADS, CHANNELS
            )
            store_columns(u0, u1, u2, u3, slope, up_columns_ptr, columns_row, token, channel, F, True, QUADS, CHANNELS)
            store_columns(a0, a1, a2, a3, act, act_columns_ptr, columns_row, token, channel, F, False, QUADS, CHANNELS)
    note(slope_amax_ptr, slopes)
    note(act_amax_ptr, acts)


def swiglu_fp8_triton(
    h_N2F: Tensor, gauge: Gauge, rows_NF: Tensor | None = None, columns_FP: Tensor | None = None
) -> None:
    """As `swiglu_fp8.swiglu_fp8_reference`."""
    assert h_N2F.stride(1) == 1, "channels of a row lie side by side"
    n, f = len(h_N2F), h_N2F.shape[1] // 2
    if not n:
        return
    words = as_words(columns_FP, n)
    _swiglu_fp8[(tiles(n, f, QUADS, CHANNELS),)](
        h_N2F, gauge.scale, as_bits(gauge.amax), rows_NF, words,
        h_N2F.stride(0), row_of(rows_NF), row_of(words), n, f,
        ROWS=rows_NF is not None, COLUMNS=words is not None, E5M2=is_e5m2(rows_NF, columns_FP),
        QUADS=QUADS, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip


def swiglu_backward_fp8_triton(
    dact_NF: Tensor,
    h_N2F: Tensor,
    slope_gauge: Gauge,
    slope_rows_N2F: Tensor | None,
    slope_columns_2FP: Tensor | None,
    act_gauge: Gauge,
    act_columns_FP: Tensor | None,
) -> None:
    """As `swiglu_fp8.swiglu_backward_fp8_reference`."""
    assert h_N2F.stride(1) == dact_NF.stride(1) == 1, "channels of a row lie side by side"
    given = [one for one in (slope_rows_N2F, slope_columns_2FP, act_columns_FP) if one is not None]
    assert [one.dtype for one in given] in ([], [E5M2, E5M2, E4M3]), "all are given or none, slopes in e5m2"
    n, f = dact_NF.shape
    if not n:
        return
    slope_words, act_words = as_words(slope_columns_2FP, n), as_words(act_columns_FP, n)
    _swiglu_backward_fp8[(tiles(n, f, BACKWARD_TILES * BACKWARD_QUADS, CHANNELS),)](
        dact_NF, h_N2F, slope_gauge.scale, as_bits(slope_gauge.amax), slope_rows_N2F, slope_words,
        act_gauge.scale, as_bits(act_gauge.amax), act_words,
        dact_NF.stride(0), h_N2F.stride(0), row_of(slope_rows_N2F), row_of(slope_words), n, f,
        WRITES=bool(given), TILES=BACKWARD_TILES, STAGES=STAGES, QUADS=BACKWARD_QUADS, CHANNELS=CHANNELS,
        num_warps=WARPS,
    )  # fmt: skip
