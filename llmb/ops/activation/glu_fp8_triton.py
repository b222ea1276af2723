"""Triton kernels of SwiGLU or GeGLU into fp8 and its backward: one program takes one tile of channels and tokens.

The backward writes five tiles of 8 bits for the three of 16 that it reads. It takes shorter tiles, so that all fit into
registers, and several in sequence: while one is worked on, the next are prefetched to shared memory. The others would
only execute more instructions for it, which bound them at the clock that a power-limited GPU sustains.
"""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.activation.activation_triton import activation_and_grad, silu_and_grad
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2, ScaleAmax
from llmb.ops.quant.fp8_quant_triton import (
    CHANNELS,
    ON_CPU,
    QUADS,
    SCALARS,
    WARPS,
    amax_bits,
    as_words,
    is_e5m2,
    load_fourth,
    max_abs,
    max_nan,
    row_stride,
    store_columns,
    store_rows,
    store_tile,
    tile_count,
    tile_origin,
    update_amax,
)

BACKWARD_QUADS, BACKWARD_TILES, STAGES = 16, 4, 3  # 64 tokens of a tile, tiles of a program, tiles in flight
BACKWARD_SCALARS = tuple(f"{tensor}_{scalar}" for tensor in ("dh", "act") for scalar in SCALARS)


@triton.jit
def _sigmoid(x):
    """Sigmoid by approximate instructions, exact up to the last bits of fp32, which fp8 does not see."""
    if ON_CPU:
        return tl.sigmoid(x)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"  # 2 ** (-x / log(2))
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _activation_and_grad(x, dy, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return silu_and_grad(x, dy, _sigmoid(x))
    else:
        return activation_and_grad(x, dy, ACTIVATION)


@triton.jit
def _act_fourth(
    h_ptr, h_stride, token, channel, n, F,
    ACTIVATION: tl.constexpr, FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    gate = load_fourth(h_ptr, h_stride, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    up = load_fourth(h_ptr + F, h_stride, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    act, _ = _activation_and_grad(gate, 1.0, ACTIVATION)
    return act * up


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=SCALARS)
def _glu_fp8(
    h_ptr, scale_ptr, amax_ptr, rows_ptr, columns_ptr, h_stride, rows_stride, columns_stride, n, F,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel = tile_origin(F, QUADS, CHANNELS)
    x0 = _act_fourth(h_ptr, h_stride, token, channel, n, F, ACTIVATION, 0, QUADS, CHANNELS)
    x1 = _act_fourth(h_ptr, h_stride, token, channel, n, F, ACTIVATION, 1, QUADS, CHANNELS)
    x2 = _act_fourth(h_ptr, h_stride, token, channel, n, F, ACTIVATION, 2, QUADS, CHANNELS)
    x3 = _act_fourth(h_ptr, h_stride, token, channel, n, F, ACTIVATION, 3, QUADS, CHANNELS)
    store_tile(
        x0, x1, x2, x3, scale_ptr, amax_ptr, rows_ptr, columns_ptr, rows_stride, columns_stride, token, channel, n, F,
        ROWS, COLUMNS, E5M2, QUADS, CHANNELS,
    )  # fmt: skip


@triton.jit
def _grads_fourth(
    dact_ptr, h_ptr, dact_stride, h_stride, token, channel, n, F,
    ACTIVATION: tl.constexpr, FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and the activation."""
    gate = load_fourth(h_ptr, h_stride, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    up = load_fourth(h_ptr + F, h_stride, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    dact = load_fourth(dact_ptr, dact_stride, token, channel, n, F, FOURTH, QUADS, CHANNELS)
    act, dgate = _activation_and_grad(gate, dact * up, ACTIVATION)
    return dgate, dact * act, act * up


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=BACKWARD_SCALARS)
def _glu_backward_fp8(
    dact_ptr, h_ptr, dh_scale_ptr, dh_amax_ptr, dh_rows_ptr, dh_columns_ptr, act_scale_ptr, act_amax_ptr,
    act_columns_ptr, dact_stride, h_stride, rows_stride, columns_stride, n, F,
    ACTIVATION: tl.constexpr,
    WRITES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    first, channel = tile_origin(F, TILES * QUADS, CHANNELS)
    dh_amax, act_amax = tl.zeros((QUADS, CHANNELS), tl.float32), tl.zeros((QUADS, CHANNELS), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        token = first + tile * (4 * QUADS)
        g0, u0, a0 = _grads_fourth(
            dact_ptr, h_ptr, dact_stride, h_stride, token, channel, n, F, ACTIVATION, 0, QUADS, CHANNELS
        )
        g1, u1, a1 = _grads_fourth(
            dact_ptr, h_ptr, dact_stride, h_stride, token, channel, n, F, ACTIVATION, 1, QUADS, CHANNELS
        )
        g2, u2, a2 = _grads_fourth(
            dact_ptr, h_ptr, dact_stride, h_stride, token, channel, n, F, ACTIVATION, 2, QUADS, CHANNELS
        )
        g3, u3, a3 = _grads_fourth(
            dact_ptr, h_ptr, dact_stride, h_stride, token, channel, n, F, ACTIVATION, 3, QUADS, CHANNELS
        )
        dh_amax = max_nan(dh_amax, max_nan(max_abs(g0, g1, g2, g3), max_abs(u0, u1, u2, u3)))
        act_amax = max_nan(act_amax, max_abs(a0, a1, a2, a3))
        if WRITES:
            up_rows_ptr, up_columns_ptr = dh_rows_ptr + F, dh_columns_ptr + tl.cast(F, tl.int64) * columns_stride
            store_rows(
                g0, g1, g2, g3, dh_scale_ptr, dh_rows_ptr, rows_stride, token, channel, n, F, True, QUADS, CHANNELS
            )
            store_rows(
                u0, u1, u2, u3, dh_scale_ptr, up_rows_ptr, rows_stride, token, channel, n, F, True, QUADS, CHANNELS
            )
            store_columns(
                g0, g1, g2, g3, dh_scale_ptr, dh_columns_ptr, columns_stride, token, channel, F, True, QUADS, CHANNELS
            )
            store_columns(
                u0, u1, u2, u3, dh_scale_ptr, up_columns_ptr, columns_stride, token, channel, F, True, QUADS, CHANNELS
            )
            store_columns(
                a0, a1, a2, a3, act_scale_ptr, act_columns_ptr, columns_stride, token, channel, F,
                False, QUADS, CHANNELS,
            )  # fmt: skip
    update_amax(dh_amax_ptr, dh_amax)
    update_amax(act_amax_ptr, act_amax)


def glu_fp8_triton(
    h_N2F: Tensor,
    activation: str,
    scale_amax: ScaleAmax,
    rows_NF: Tensor | None = None,
    columns_FP: Tensor | None = None,
) -> None:
    """Launch the kernel of `glu_fp8.glu_fp8`."""
    assert h_N2F.stride(1) == 1, "channels must be contiguous"
    n, f = len(h_N2F), h_N2F.shape[1] // 2
    if not n:
        return
    words = as_words(columns_FP, n)
    _glu_fp8[(tile_count(n, f, QUADS, CHANNELS),)](
        h_N2F, scale_amax.scale, amax_bits(scale_amax), rows_NF, words,
        h_N2F.stride(0), row_stride(rows_NF), row_stride(words), n, f,
        ACTIVATION=activation, ROWS=rows_NF is not None, COLUMNS=words is not None, E5M2=is_e5m2(rows_NF, columns_FP),
        QUADS=QUADS, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip


def glu_backward_fp8_triton(
    dact_NF: Tensor,
    h_N2F: Tensor,
    activation: str,
    dh_scale_amax: ScaleAmax,
    dh_rows_N2F: Tensor | None,
    dh_columns_2FP: Tensor | None,
    act_scale_amax: ScaleAmax,
    act_columns_FP: Tensor | None,
) -> None:
    """Launch the kernel of `glu_fp8.glu_backward_fp8`."""
    assert h_N2F.stride(1) == dact_NF.stride(1) == 1, "channels must be contiguous"
    outputs = [x for x in (dh_rows_N2F, dh_columns_2FP, act_columns_FP) if x is not None]
    assert [x.dtype for x in outputs] in ([], [E5M2, E5M2, E4M3]), "all outputs or none, gradients in e5m2"
    n, f = dact_NF.shape
    if not n:
        return
    dh_words, act_words = as_words(dh_columns_2FP, n), as_words(act_columns_FP, n)
    _glu_backward_fp8[(tile_count(n, f, BACKWARD_TILES * BACKWARD_QUADS, CHANNELS),)](
        dact_NF, h_N2F, dh_scale_amax.scale, amax_bits(dh_scale_amax), dh_rows_N2F, dh_words,
        act_scale_amax.scale, amax_bits(act_scale_amax), act_words,
        dact_NF.stride(0), h_N2F.stride(0), row_stride(dh_rows_N2F), row_stride(dh_words), n, f,
        ACTIVATION=activation, WRITES=bool(outputs), TILES=BACKWARD_TILES, STAGES=STAGES, QUADS=BACKWARD_QUADS,
        CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
