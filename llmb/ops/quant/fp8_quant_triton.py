"""Triton for 8-bit matrices in both forms: how a tile that a kernel holds is written, and the kernel that only does so.

A tile is held as four, of every fourth token each. So four tokens of a channel lie in one thread, which packs them into
a word of 32 bits, and words are transposed, a quarter of the exchanges that bytes would take.

Each form is rounded by itself. Where one rounding serves both, ptxas (the one of Triton 3.6) merges the conversions for
the rows and goes on to read their halves for the columns, from registers that hold something else by then.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dispatch import INTERPRETED
from llmb.ops.gemm.fp8_linear import E5M2
from llmb.ops.quant.fp8_quant import Gauge, padded

QUADS, CHANNELS, WARPS = 32, 64, 4  # of a tile: 128 tokens, whole lines of memory whichever way it is written
ON_CPU = tl.constexpr(INTERPRETED)
CELLS = ("scale_ptr", "amax_ptr")  # anywhere in a tensor of many: a kernel is not compiled for where they lie


@triton.jit
def tile_of(K, QUADS: tl.constexpr, CHANNELS: tl.constexpr):
    """The first token and the first channel of this program's tile. Programs of the same tokens follow one another."""
    across = tl.cdiv(K, CHANNELS)
    program = tl.program_id(0)
    return program // across * (4 * QUADS), program % across * CHANNELS


@triton.jit
def load_fourth(ptr, stride, token, channel, n, K, FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr):
    """Every fourth token of a tile, from this one on, in fp32."""
    t, k = _tokens(FOURTH, QUADS), tl.arange(0, CHANNELS)[None, :]
    places = ptr + (token.to(tl.int64) * stride + channel) + (t * stride + k)
    return tl.load(places, mask=(token + t < n) & (channel + k < K), other=0.0).to(tl.float32)


@triton.jit
def inverse_of(scale_ptr):
    """Volatile: what is rounded with this is not taken for what was rounded with another load of the same scale."""
    return tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(scale_ptr, volatile=True))


@triton.jit
def magnitude_of(x0, x1, x2, x3):
    """The largest of four tokens, for each channel; NaN is larger than all."""
    return larger(larger(tl.abs(x0), tl.abs(x1)), larger(tl.abs(x2), tl.abs(x3)))


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def note(amax_ptr, magnitudes):
    """The largest of these into a cell. As integers of the same bits they have the same order, NaN at its end."""
    tl.atomic_max(amax_ptr, tl.max(magnitudes.to(tl.int32, bitcast=True).reshape(magnitudes.numel)), sem="relaxed")


@triton.jit
def store_forms(
    x0, x1, x2, x3, scale_ptr, amax_ptr, rows_ptr, columns_ptr, rows_row, columns_row, token, channel, n, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A tile in the forms asked for, and its largest magnitude."""
    note(amax_ptr, magnitude_of(x0, x1, x2, x3))
    if ROWS:
        store_rows(x0, x1, x2, x3, scale_ptr, rows_ptr, rows_row, token, channel, n, K, E5M2, QUADS, CHANNELS)
    if COLUMNS:
        store_columns(x0, x1, x2, x3, scale_ptr, columns_ptr, columns_row, token, channel, K, E5M2, QUADS, CHANNELS)


@triton.jit
def store_rows(
    x0, x1, x2, x3, scale_ptr, ptr, stride, token, channel, n, K,
    E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A tile, divided by its scale and rounded, as it lies."""
    inverse = inverse_of(scale_ptr)
    base = ptr + (token.to(tl.int64) * stride + channel)
    store_fourth(eight_bits(x0, inverse, E5M2), base, stride, n - token, K - channel, 0, QUADS, CHANNELS)
    store_fourth(eight_bits(x1, inverse, E5M2), base, stride, n - token, K - channel, 1, QUADS, CHANNELS)
    store_fourth(eight_bits(x2, inverse, E5M2), base, stride, n - token, K - channel, 2, QUADS, CHANNELS)
    store_fourth(eight_bits(x3, inverse, E5M2), base, stride, n - token, K - channel, 3, QUADS, CHANNELS)


@triton.jit
def store_columns(
    x0, x1, x2, x3, scale_ptr, words_ptr, stride, token, channel, K,
    E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A tile, divided by its scale and rounded, transposed, in words of four tokens; a row has `stride` words."""
    words = packed(x0, x1, x2, x3, inverse_of(scale_ptr), E5M2)
    k, quad = tl.arange(0, CHANNELS)[:, None], tl.arange(0, QUADS)[None, :]
    base = words_ptr + (channel.to(tl.int64) * stride + token // 4)
    inside = (channel + k < K) & (token // 4 + quad < stride)
    tl.store(base + (k * stride + quad), tl.trans(words), mask=inside)


@triton.jit
def packed(x0, x1, x2, x3, inverse, E5M2: tl.constexpr):
    """Four tokens of a channel in a word, divided by their scale and rounded."""
    if ON_CPU:
        words = _byte(x0, inverse, E5M2) | (_byte(x1, inverse, E5M2) << 8)
        return words | (_byte(x2, inverse, E5M2) << 16) | (_byte(x3, inverse, E5M2) << 24)
    # Two conversions of two tokens each; bytes that were made beside others would have to be taken apart again.
    form: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite." + form + ".f32 low, $2, $1;"
        " cvt.rn.satfinite." + form + ".f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse], tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def eight_bits(x, inverse, E5M2: tl.constexpr):
    """Numbers divided by their scale, clamped, which a GPU does as it rounds, and rounded; NaN stays NaN."""
    values = x * inverse
    if ON_CPU:
        largest: tl.constexpr = 57344.0 if E5M2 else 448.0
        values = tl.minimum(larger(values, -largest), largest, propagate_nan=tl.PropagateNan.ALL)
    return values.to(tl.float8e5 if E5M2 else tl.float8e4nv)


@triton.jit
def _byte(x, inverse, E5M2: tl.constexpr):
    return eight_bits(x, inverse, E5M2).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _tokens(FOURTH: tl.constexpr, QUADS: tl.constexpr):
    return 4 * tl.arange(0, QUADS)[:, None] + FOURTH


@triton.jit
def store_fourth(
    values, base, stride, tokens_left, channels_left,
    FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Every fourth token of a tile, from this one on, in 8 bits already."""
    t, k = _tokens(FOURTH, QUADS), tl.arange(0, CHANNELS)[None, :]
    tl.store(base + (t * stride + k), values, mask=(t < tokens_left) & (k < channels_left))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=CELLS)
def _cast_both(
    x_ptr, scale_ptr, amax_ptr, rows_ptr, columns_ptr, x_row, rows_row, columns_row, n, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel = tile_of(K, QUADS, CHANNELS)
    x0 = load_fourth(x_ptr, x_row, token, channel, n, K, 0, QUADS, CHANNELS)
    x1 = load_fourth(x_ptr, x_row, token, channel, n, K, 1, QUADS, CHANNELS)
    x2 = load_fourth(x_ptr, x_row, token, channel, n, K, 2, QUADS, CHANNELS)
    x3 = load_fourth(x_ptr, x_row, token, channel, n, K, 3, QUADS, CHANNELS)
    store_forms(
        x0, x1, x2, x3, scale_ptr, amax_ptr, rows_ptr, columns_ptr, rows_row, columns_row, token, channel, n, K,
        ROWS, COLUMNS, E5M2, QUADS, CHANNELS,
    )  # fmt: skip


def cast_both_triton(
    x_NK: Tensor, gauge: Gauge, rows_NK: Tensor | None = None, columns_KP: Tensor | None = None
) -> None:
    """As `fp8_forms.cast_both_reference`."""
    assert x_NK.stride(1) == 1, "channels of a row lie side by side"
    n, k = x_NK.shape
    if not n:
        return
    words = as_words(columns_KP, n)
    _cast_both[(tiles(n, k, QUADS, CHANNELS),)](
        x_NK, gauge.scale, as_bits(gauge.amax), rows_NK, words,
        x_NK.stride(0), row_of(rows_NK), row_of(words), n, k,
        ROWS=rows_NK is not None, COLUMNS=words is not None, E5M2=is_e5m2(rows_NK, columns_KP),
        QUADS=QUADS, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip


def tiles(n: int, k: int, quads: int, channels: int) -> int:
    """Programs of a matrix."""
    return triton.cdiv(n, 4 * quads) * triton.cdiv(k, channels)


def as_words(columns_KP: Tensor | None, tokens: int) -> Tensor | None:
    """Columns as kernels write them, four tokens in a word."""
    if columns_KP is None:
        return None
    assert columns_KP.is_contiguous(), "tokens of a channel lie side by side, channels behind one another"
    assert columns_KP.shape[1] == padded(tokens), "a column is padded(tokens) long"
    return columns_KP.view(torch.int32)


def as_bits(amax: Tensor) -> Tensor:
    """A cell as kernels compare it: magnitudes are ordered as the integers of the same bits."""
    assert amax.dtype == torch.float32
    return amax.view(torch.int32)


def row_of(x: Tensor | None) -> int:
    """Numbers from one row to the next."""
    return 0 if x is None else x.stride(0)


def is_e5m2(*forms: Tensor | None) -> bool:
    """The format that these forms have in common."""
    dtypes = {one.dtype for one in forms if one is not None}
    assert len(dtypes) < 2, "both forms have one format"
    return E5M2 in dtypes
