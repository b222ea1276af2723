"""Triton kernel that quantizes a matrix to fp8 in both layouts, and helpers for other kernels to quantize a tile.

A tile is held as four, of every fourth token each. So four tokens of a channel are in one thread, which packs them into
a 32-bit word, and words are transposed: a quarter of the shuffles that bytes would take.

Each layout is rounded by itself. Where one rounding serves both, ptxas (the one of Triton 3.6) merges the conversions
for the rows and goes on to read their halves for the columns, from registers that hold something else by then.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dispatch import INTERPRETED
from llmb.ops.quant.fp8_quant import E5M2, ScaleAmax, padded_tokens

QUADS, CHANNELS, WARPS = 32, 64, 4  # of a tile: 128 tokens, whole cache lines in either layout
ON_CPU = tl.constexpr(INTERPRETED)
SCALARS = ("scale_ptr", "amax_ptr")  # anywhere in a larger tensor: kernels are not specialized on their alignment


@triton.jit
def tile_origin(K, QUADS: tl.constexpr, CHANNELS: tl.constexpr):
    """First token and first channel of this program's tile. Programs of the same tokens are consecutive."""
    tiles_per_row = tl.cdiv(K, CHANNELS)
    program = tl.program_id(0)
    return program // tiles_per_row * (4 * QUADS), program % tiles_per_row * CHANNELS


@triton.jit
def load_fourth(ptr, stride, token, channel, n, K, FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr):
    """Every fourth token of a tile, from this one on, in fp32."""
    t, k = _tokens(FOURTH, QUADS), tl.arange(0, CHANNELS)[None, :]
    pointers = ptr + (token.to(tl.int64) * stride + channel) + (t * stride + k)
    return tl.load(pointers, mask=(token + t < n) & (channel + k < K), other=0.0).to(tl.float32)


@triton.jit
def load_tile(ptr, stride, token, channel, n, K, QUADS: tl.constexpr, CHANNELS: tl.constexpr):
    """A tile in fp32, as four."""
    x0 = load_fourth(ptr, stride, token, channel, n, K, 0, QUADS, CHANNELS)
    x1 = load_fourth(ptr, stride, token, channel, n, K, 1, QUADS, CHANNELS)
    x2 = load_fourth(ptr, stride, token, channel, n, K, 2, QUADS, CHANNELS)
    x3 = load_fourth(ptr, stride, token, channel, n, K, 3, QUADS, CHANNELS)
    return x0, x1, x2, x3


@triton.jit
def load_inverse_scale(scale_ptr):
    """1 / scale. Volatile: values rounded with this are not merged with those rounded after another load of it."""
    return tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(scale_ptr, volatile=True))


@triton.jit
def max_abs(x0, x1, x2, x3):
    """The largest magnitude of four tokens, for each channel; NaN is larger than all."""
    return max_nan(max_nan(tl.abs(x0), tl.abs(x1)), max_nan(tl.abs(x2), tl.abs(x3)))


@triton.jit
def magnitude_bits(x):
    """Integers that have the order of the magnitudes, NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def invert(scales):
    """1 / scales, rounded to nearest."""
    return tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)


@triton.jit
def max_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def update_amax(amax_ptr, magnitudes):
    """Atomic maximum. Integers of the same bits have the order of the magnitudes, NaN last."""
    if amax_ptr is not None:
        largest = tl.max(magnitudes.to(tl.int32, bitcast=True).reshape(magnitudes.numel))
        tl.atomic_max(amax_ptr, largest, sem="relaxed")


@triton.jit
def store_tile(
    x0, x1, x2, x3, scale_ptr, amax_ptr, rows_ptr, columns_ptr, rows_stride, columns_stride, token, channel, n, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Quantize a tile to the requested layouts, and update amax."""
    update_amax(amax_ptr, max_abs(x0, x1, x2, x3))
    if ROWS:
        store_rows(x0, x1, x2, x3, scale_ptr, rows_ptr, rows_stride, token, channel, n, K, E5M2, QUADS, CHANNELS)
    if COLUMNS:
        store_columns(x0, x1, x2, x3, scale_ptr, columns_ptr, columns_stride, token, channel, K, E5M2, QUADS, CHANNELS)


@triton.jit
def store_rows(
    x0, x1, x2, x3, scale_ptr, ptr, stride, token, channel, n, K,
    E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Quantize a tile, row-wise."""
    inverse = load_inverse_scale(scale_ptr)
    base = ptr + (token.to(tl.int64) * stride + channel)
    store_fourth(to_fp8(x0, inverse, E5M2), base, stride, n - token, K - channel, 0, QUADS, CHANNELS)
    store_fourth(to_fp8(x1, inverse, E5M2), base, stride, n - token, K - channel, 1, QUADS, CHANNELS)
    store_fourth(to_fp8(x2, inverse, E5M2), base, stride, n - token, K - channel, 2, QUADS, CHANNELS)
    store_fourth(to_fp8(x3, inverse, E5M2), base, stride, n - token, K - channel, 3, QUADS, CHANNELS)


@triton.jit
def store_columns(
    x0, x1, x2, x3, scale_ptr, words_ptr, stride, token, channel, K,
    E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Quantize a tile, transposed, in words of four tokens; a row has `stride` words."""
    words = pack_fp8(x0, x1, x2, x3, load_inverse_scale(scale_ptr), E5M2)
    k, quad = tl.arange(0, CHANNELS)[:, None], tl.arange(0, QUADS)[None, :]
    base = words_ptr + (channel.to(tl.int64) * stride + token // 4)
    mask = (channel + k < K) & (token // 4 + quad < stride)
    tl.store(base + (k * stride + quad), tl.trans(words), mask=mask)


@triton.jit
def pack_fp8(x0, x1, x2, x3, inverse, E5M2: tl.constexpr):
    """Four tokens of a channel, divided by their scale and rounded, in one word."""
    if ON_CPU:
        words = _byte(x0, inverse, E5M2) | (_byte(x1, inverse, E5M2) << 8)
        return words | (_byte(x2, inverse, E5M2) << 16) | (_byte(x3, inverse, E5M2) << 24)
    # Two conversions of two tokens each; bytes converted together with others would have to be separated again.
    dtype: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite." + dtype + ".f32 low, $2, $1;"
        " cvt.rn.satfinite." + dtype + ".f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse], tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def to_fp8(x, inverse, E5M2: tl.constexpr):
    """Divide by the scale, clamp (which a GPU's conversion does) and round; NaN stays NaN."""
    values = x * inverse
    if ON_CPU:
        largest: tl.constexpr = 57344.0 if E5M2 else 448.0
        values = tl.minimum(max_nan(values, -largest), largest, propagate_nan=tl.PropagateNan.ALL)
    return values.to(tl.float8e5 if E5M2 else tl.float8e4nv)


@triton.jit
def _byte(x, inverse, E5M2: tl.constexpr):
    return to_fp8(x, inverse, E5M2).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _tokens(FOURTH: tl.constexpr, QUADS: tl.constexpr):
    return 4 * tl.arange(0, QUADS)[:, None] + FOURTH


@triton.jit
def store_fourth(
    values, base, stride, tokens_left, channels_left,
    FOURTH: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store every fourth token of a tile, from this one on, already in fp8."""
    t, k = _tokens(FOURTH, QUADS), tl.arange(0, CHANNELS)[None, :]
    tl.store(base + (t * stride + k), values, mask=(t < tokens_left) & (k < channels_left))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=SCALARS)
def _quantize_fp8(
    x_ptr, scale_ptr, amax_ptr, rows_ptr, columns_ptr, x_stride, rows_stride, columns_stride, n, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, QUADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel = tile_origin(K, QUADS, CHANNELS)
    x0, x1, x2, x3 = load_tile(x_ptr, x_stride, token, channel, n, K, QUADS, CHANNELS)
    store_tile(
        x0, x1, x2, x3, scale_ptr, amax_ptr, rows_ptr, columns_ptr, rows_stride, columns_stride, token, channel, n, K,
        ROWS, COLUMNS, E5M2, QUADS, CHANNELS,
    )  # fmt: skip


def quantize_fp8_triton(
    x_NK: Tensor, scale_amax: ScaleAmax, rows_NK: Tensor | None = None, columns_KP: Tensor | None = None
) -> None:
    """Launch the kernel of `fp8_quant.quantize_fp8`."""
    assert x_NK.stride(1) == 1, "channels must be contiguous"
    n, k = x_NK.shape
    if not n:
        return
    words = as_words(columns_KP, n)
    _quantize_fp8[(tile_count(n, k, QUADS, CHANNELS),)](
        x_NK, scale_amax.scale, amax_bits(scale_amax), rows_NK, words,
        x_NK.stride(0), row_stride(rows_NK), row_stride(words), n, k,
        ROWS=rows_NK is not None, COLUMNS=words is not None, E5M2=is_e5m2(rows_NK, columns_KP),
        QUADS=QUADS, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip


def tile_count(n: int, k: int, quads: int, channels: int) -> int:
    """Return the programs of a matrix."""
    return triton.cdiv(n, 4 * quads) * triton.cdiv(k, channels)


def as_words(columns_KP: Tensor | None, tokens: int) -> Tensor | None:
    """View columns as kernels write them, four tokens in a word."""
    if columns_KP is None:
        return None
    assert columns_KP.is_contiguous(), "columns must be contiguous"
    assert columns_KP.shape[1] == padded_tokens(tokens), "columns have padded_tokens(tokens) tokens"
    return columns_KP.view(torch.int32)


def amax_bits(scale_amax: ScaleAmax) -> Tensor | None:
    """View amax as kernels compare it: magnitudes are ordered as the integers of the same bits."""
    if scale_amax.amax is None:
        return None
    assert scale_amax.amax.dtype == torch.float32
    return scale_amax.amax.view(torch.int32)


def row_stride(x: Tensor | None) -> int:
    """Return the elements from one row to the next."""
    return 0 if x is None else x.stride(0)


def is_e5m2(*layouts: Tensor | None) -> bool:
    """Return whether the layouts, which share a dtype, are e5m2."""
    dtypes = {x.dtype for x in layouts if x is not None}
    assert len(dtypes) < 2, "both layouts have one dtype"
    return E5M2 in dtypes
