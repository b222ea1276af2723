"""Triton kernel of the skinny GEMM: persistent programs take groups of rows of the weight in turn.

A program prefetches the next group while it computes with the last, and its first before the previous kernel has ended.
A token's inputs are loaded once for all groups where registers hold them; else again with each tile of a row. Rows of
gate and up are interleaved, so that a program can combine the two.

One token with fp8 weights leaves no time for an fp32 multiplication of each: there, pairs of weights become pairs of
fp16, which hold them exactly, and are multiplied with inputs in fp16 that were scaled by their amax. Sums of eight
products are in fp16, sums of these in fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.activation.activation_triton import activation_value
from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.device_capabilities import TUNED_SMS, scaled_to_sms
from llmb.ops.dispatch import INTERPRETED
from llmb.ops.gemm.skinny_gemm import InputNorm, SkinnyGemmWeight
from llmb.ops.quant.activation_quant import PerTokenFp8


class Tile(NamedTuple):
    """Elements of the weight that a program holds at a time, and programs that a multiprocessor runs at once."""

    elements: int
    warps: int
    programs: int


# The fastest measured on an H200 for the layers of Llama 8b, by the bytes of an element and the number of tokens: for a
# weight with long rows, such as the down projection, and for others.
TILES = {
    (2, 1): {"long": Tile(16384, 8, 2), "short": Tile(8192, 4, 4)},
    (2, 2): {"long": Tile(32768, 8, 2), "short": Tile(16384, 8, 2)},
    (1, 1): {"long": Tile(32768, 4, 2), "short": Tile(16384, 4, 4)},
    (1, 2): {"long": Tile(65536, 16, 1), "short": Tile(16384, 4, 4)},
}
LONG_ROW = 8192  # inputs above which a row is long
MAX_ROWS = 8
MAX_INPUTS = 64  # that a thread holds in as many registers


def tile_of(values_OK: Tensor, tokens: int) -> Tile:
    """Return the tile for a weight of this shape and dtype and so many tokens."""
    return TILES[min(values_OK.itemsize, 2), min(tokens, 2)]["long" if values_OK.shape[1] > LONG_ROW else "short"]


def step_of(tile: Tile, tokens: int, inputs: int, packed: bool) -> int:
    """Return how many inputs a program takes at a time: all, or as many as it has registers for."""
    limit = MAX_INPUTS * 32 * tile.warps * (2 if packed else 1)
    step = max(triton.next_power_of_2(inputs), 256)
    while step * tokens > limit:
        step //= 2
    return step


@triton.jit
def _rows(group, outputs, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Return the weight's rows of a group, and the mask of those that exist."""
    i = tl.arange(0, ROWS)
    if GATED:
        pair = group * (ROWS // 2) + i // 2
        return pair + (i % 2) * outputs, pair < outputs
    else:
        return group * ROWS + i, group * ROWS + i < outputs


@triton.jit
def _load_tile(
    weight_ptr, group, chunk, outputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr
):
    row, valid = _rows(group, outputs, ROWS, GATED)
    k = chunk * STEP + tl.arange(0, STEP)
    return tl.load(
        weight_ptr + row.to(tl.int64)[:, None] * K + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0.0
    )


@triton.jit
def _append(items, item):
    """Return the tuple with one more item."""
    items += (item,)
    return items


@triton.jit
def _input_indices(chunk, STEP: tl.constexpr, PACKED: tl.constexpr):
    """Return the input indices of a tile; packed, in groups of pack."""
    if PACKED:
        return chunk * STEP + tl.arange(0, STEP // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    else:
        return chunk * STEP + tl.arange(0, STEP)


@triton.jit
def _norm_weight(norm_ptr, k, K: tl.constexpr, HAS_NORM: tl.constexpr):
    if HAS_NORM:
        return tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    else:
        return 1.0


@triton.jit
def _sum_and_max(sum_a, max_a, sum_b, max_b):
    return sum_a + sum_b, tl.maximum(max_a, max_b)


@triton.jit
def _pairs(x, STEP: tl.constexpr):
    """Return pack inputs as four pairs of fp16."""
    first, second = tl.split(tl.reshape(x, (STEP // 8, 4, 2)))
    both = tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
    )
    even, odd = tl.split(tl.reshape(both, (STEP // 8, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _inputs(
    x_ptr, norm, k, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, HAS_NORM: tl.constexpr, PACKED: tl.constexpr
):
    """Return for each token its inputs times the norm's weight, the scale they still lack, and their sum of squares."""
    tokens, scales, squares = (), (), ()
    for n in tl.static_range(N):
        x = tl.load(x_ptr + n * K + k, mask=k < K, other=0.0).to(tl.float32)
        normed = x * norm if HAS_NORM else x
        if PACKED:
            flat = (tl.reshape(x * x, (STEP,)), tl.reshape(tl.abs(normed), (STEP,)))
            square, amax = tl.reduce(flat, 0, _sum_and_max)
            amax = tl.maximum(amax, 1e-30)
            tokens = _append(tokens, _pairs(normed * (16.0 / amax), STEP))  # 16 * 448 * 8 is within the range of fp16
            scales = _append(scales, amax / 16.0)
        else:
            square = tl.sum(x * x, 0)
            tokens = _append(tokens, normed)
            scales = _append(scales, 1.0)
        squares = _append(squares, square)
    return tokens, scales, squares


_FP8_TO_FP16 = tl.constexpr("""{
.reg .b32 lo, hi; .reg .b16 a, b, c, d;
mov.b64 {lo, hi}, $4; mov.b32 {a, b}, lo; mov.b32 {c, d}, hi;
cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d;
}""")
_DOT_OF_EIGHT = tl.constexpr("""{
.reg .b32 p; .reg .b16 u, v; .reg .f32 f, g;
mul.rn.f16x2 p, $1, $5; fma.rn.f16x2 p, $2, $6, p; fma.rn.f16x2 p, $3, $7, p; fma.rn.f16x2 p, $4, $8, p;
mov.b32 {u, v}, p; cvt.f32.f16 f, u; cvt.f32.f16 g, v; add.f32 $0, f, g;
}""")


@triton.jit
def _dots(tile, inputs, N: tl.constexpr, PACKED: tl.constexpr):
    """Return the dot products of each token with the rows of a tile of the weight."""
    dots = ()
    if PACKED:
        a, b, c, d = tl.inline_asm_elementwise(
            _FP8_TO_FP16, "=r,=r,=r,=r,l", [tile], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        for n in tl.static_range(N):
            x = inputs[n]
            products = tl.inline_asm_elementwise(
                _DOT_OF_EIGHT, "=f,r,r,r,r,r,r,r,r",
                [a, b, c, d, x[0][None, :], x[1][None, :], x[2][None, :], x[3][None, :]],
                dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
            dots = _append(dots, tl.sum(products, 1))
    else:
        weight = tile.to(tl.float32)
        for n in tl.static_range(N):
            dots = _append(dots, tl.sum(weight * inputs[n][None, :], 1))
    return dots


@triton.jit
def _epilogue_operands(
    group, scales_ptr, addend_ptr, outputs,
    N: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    """Return what a group's sums are multiplied by and added to."""
    row, valid = _rows(group, outputs, ROWS, GATED)
    scales = 1.0
    if HAS_SCALES:
        scales = tl.load(scales_ptr + row, mask=valid, other=0.0)
    addends = ()
    for n in tl.static_range(N):
        if HAS_ADDEND:
            o = group * (ROWS // 2) + tl.arange(0, ROWS // 2) if GATED else row
            addends = _append(
                addends, tl.load(addend_ptr + n * outputs + o, mask=o < outputs, other=0.0).to(tl.float32)
            )
        else:
            addends = _append(addends, 0.0)
    return scales, addends


@triton.jit
def _skinny_gemm(
    x_ptr, weight_ptr, scales_ptr, x_scales_ptr, norm_ptr, addend_ptr, out_ptr, eps, outputs, groups, programs,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_X_SCALES: tl.constexpr, HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr, HAS_ADDEND: tl.constexpr,
    PACKED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    chunks: tl.constexpr = (K + STEP - 1) // STEP
    gated: tl.constexpr = ACTIVATION != ""
    pack: tl.constexpr = 8 if PACKED else 1
    program = tl.program_id(0)
    words = weight_ptr.to(tl.pointer_type(tl.int64), bitcast=True) if PACKED else weight_ptr
    w_tile = _load_tile(words, program, 0, outputs, K // pack, ROWS, STEP // pack, gated)
    k = _input_indices(0, STEP, PACKED)
    norm = _norm_weight(norm_ptr, k, K, HAS_NORM)
    pdl_wait(USE_PDL)  # the weight's first rows are prefetched before the input is written
    inputs, input_scales, squares = _inputs(x_ptr, norm, k, N, K, STEP, HAS_NORM, PACKED)
    scales, addends = _epilogue_operands(
        program, scales_ptr, addend_ptr, outputs, N, ROWS, gated, HAS_SCALES, HAS_ADDEND
    )
    for group in range(program, groups, programs):
        totals, sum_squares = (), ()
        for chunk in tl.static_range(chunks):
            next_group = group if chunk + 1 < chunks else group + programs
            next_w_tile = _load_tile(
                words, next_group, (chunk + 1) % chunks, outputs, K // pack, ROWS, STEP // pack, gated
            )
            if chunks > 1:
                k = _input_indices(chunk, STEP, PACKED)
                norm = _norm_weight(norm_ptr, k, K, HAS_NORM)
                inputs, input_scales, squares = _inputs(x_ptr, norm, k, N, K, STEP, HAS_NORM, PACKED)
            dots, next_totals, next_sum_squares = _dots(w_tile, inputs, N, PACKED), (), ()
            for n in tl.static_range(N):
                if chunk == 0:
                    next_totals = _append(next_totals, dots[n] * input_scales[n])
                    next_sum_squares = _append(next_sum_squares, squares[n])
                else:
                    next_totals = _append(next_totals, totals[n] + dots[n] * input_scales[n])
                    next_sum_squares = _append(next_sum_squares, sum_squares[n] + squares[n])
            totals, sum_squares, w_tile = next_totals, next_sum_squares, next_w_tile
        next_scales, next_addends = _epilogue_operands(
            group + programs, scales_ptr, addend_ptr, outputs, N, ROWS, gated, HAS_SCALES, HAS_ADDEND
        )  # prefetched a group ahead, as the weight is
        for n in tl.static_range(N):
            total = totals[n] * scales if HAS_SCALES else totals[n]
            if HAS_X_SCALES:
                total *= tl.load(x_scales_ptr + n)
            if HAS_NORM:
                total *= tl.rsqrt(sum_squares[n] / K + eps)
            if gated:
                gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
                total = activation_value(gate, ACTIVATION) * up
                o = group * (ROWS // 2) + tl.arange(0, ROWS // 2)
            else:
                o = group * ROWS + tl.arange(0, ROWS)
            if HAS_ADDEND:
                total += addends[n]
            tl.store(out_ptr + n * outputs + o, total.to(out_ptr.dtype.element_ty), mask=o < outputs)
        scales, addends = next_scales, next_addends


def skinny_gemm_triton(
    x: Tensor | PerTokenFp8,
    weight: SkinnyGemmWeight,
    dtype: torch.dtype,
    norm: InputNorm | None = None,
    activation: str | None = None,
    addend_NO: Tensor | None = None,
) -> Tensor:
    """Compute `skinny_gemm`."""
    x_NK, x_scales = (x.contiguous(), None) if isinstance(x, Tensor) else x
    values_OK, scales_O = weight
    norm_K, eps = (None, 0.0) if norm is None else norm
    (n, k), tile = x_NK.shape, tile_of(values_OK, len(x_NK))
    packed = values_OK.dtype is torch.float8_e4m3fn and k % 8 == 0 and not INTERPRETED
    step = step_of(tile, n, k, packed)
    rows_per_output = 1 if activation is None else 2
    rows = max(min(tile.elements // triton.next_power_of_2(k), MAX_ROWS), rows_per_output)
    outputs = len(values_OK) // rows_per_output
    groups = triton.cdiv(outputs, rows // rows_per_output)
    programs = min(groups, scaled_to_sms(TUNED_SMS * tile.programs, x_NK.device))
    out_NO = torch.empty(n, outputs, dtype=dtype, device=x_NK.device)
    _skinny_gemm[(programs,)](
        x_NK, values_OK, scales_O, x_scales, norm_K, None if addend_NO is None else addend_NO.contiguous(), out_NO,
        eps, outputs, groups, programs, N=n, K=k, ROWS=rows, STEP=step,
        HAS_SCALES=scales_O is not None, HAS_X_SCALES=x_scales is not None, HAS_NORM=norm is not None,
        ACTIVATION=activation or "", HAS_ADDEND=addend_NO is not None, PACKED=packed,
        num_warps=tile.warps, **pdl_options(n),
    )  # fmt: skip
    return out_NO
