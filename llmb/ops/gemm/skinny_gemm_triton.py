"""Triton for linear layers of a handful of tokens: programs stay, and take groups of rows of the weight in turn.

A program reads the next group while it computes with the last, and its first before its turn has come. What a token's
inputs are is found out once for all groups, where registers hold them; else they are read again with each piece of a
row. The rows of a gated pair lie side by side, gate and up in turn, so that a program can make one number of them.

One token of 8-bit weights leaves no time for a multiplication in fp32 of each: there, pairs of weights become pairs of
fp16, which they fit into exactly, and meet inputs in fp16 that were scaled to their largest. Sums of eight products are
in fp16, those of all in fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.activation.gated_act_triton import activated
from llmb.ops.dependent_launch import begins, dependent
from llmb.ops.dispatch import INTERPRETED
from llmb.ops.gemm.skinny_gemm import Norm, ThinWeight
from llmb.ops.quant.activation_quant import Rows8


class Tile(NamedTuple):
    """What a program holds of the weight at a time, and how many programs a processor of the GPU runs at once."""

    numbers: int
    warps: int
    programs: int


# The fastest measured on an H200 for one token of Llama 8b, by the bytes of a number: for a weight of long rows, such
# as the last of an MLP, and for others.
TILES = {
    2: {"long": Tile(32768, 8, 1), "short": Tile(16384, 8, 2)},
    1: {"long": Tile(32768, 4, 2), "short": Tile(16384, 4, 4)},
}
LONG_ROW = 8192  # inputs, from which a row is long
MOST_ROWS = 8
MOST_INPUTS = 64  # that a thread keeps in as many registers
PROCESSORS = 132  # of an H200


def tile_of(values_OK: Tensor) -> Tile:
    """For a weight of this shape and format."""
    return TILES[min(values_OK.itemsize, 2)]["long" if values_OK.shape[1] > LONG_ROW else "short"]


def step_of(tile: Tile, tokens: int, inputs: int, packed: bool) -> int:
    """Inputs that a program takes at a time: all, or as many as it has registers for."""
    most = MOST_INPUTS * 32 * tile.warps * (2 if packed else 1)
    step = max(triton.next_power_of_2(inputs), 256)
    while step * tokens > most:
        step //= 2
    return step


@triton.jit
def _rows(group, outputs, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Of a group, the weight's rows, and which of them there are."""
    i = tl.arange(0, ROWS)
    if GATED:
        pair = group * (ROWS // 2) + i // 2
        return pair + (i % 2) * outputs, pair < outputs
    else:
        return group * ROWS + i, group * ROWS + i < outputs


@triton.jit
def _piece(
    weight_ptr, group, part, outputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr
):
    row, there = _rows(group, outputs, ROWS, GATED)
    k = part * STEP + tl.arange(0, STEP)
    return tl.load(
        weight_ptr + row.to(tl.int64)[:, None] * K + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0
    )


@triton.jit
def _longer(many, one):
    """A tuple with one more at its end."""
    many += (one,)
    return many


@triton.jit
def _places(part, STEP: tl.constexpr, PACKED: tl.constexpr):
    """Of a piece's inputs; packed, by eights."""
    if PACKED:
        return part * STEP + tl.arange(0, STEP // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    else:
        return part * STEP + tl.arange(0, STEP)


@triton.jit
def _norm_weight(norm_ptr, k, K: tl.constexpr, NORMED: tl.constexpr):
    if NORMED:
        return tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    else:
        return 1.0


@triton.jit
def _sum_and_largest(sum_a, largest_a, sum_b, largest_b):
    return sum_a + sum_b, tl.maximum(largest_a, largest_b)


@triton.jit
def _pairs(x, STEP: tl.constexpr):
    """Eight inputs as four pairs of fp16."""
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
    x_ptr, norm, k, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, NORMED: tl.constexpr, PACKED: tl.constexpr
):
    """Each token's inputs times the norm's weight, what they have yet to be multiplied by, the sum of their squares."""
    found, factors, squares = (), (), ()
    for n in tl.static_range(N):
        x = tl.load(x_ptr + n * K + k, mask=k < K, other=0.0).to(tl.float32)
        normed = x * norm if NORMED else x
        if PACKED:
            flat = (tl.reshape(x * x, (STEP,)), tl.reshape(tl.abs(normed), (STEP,)))
            square, largest = tl.reduce(flat, 0, _sum_and_largest)
            largest = tl.maximum(largest, 1e-30)
            found = _longer(found, _pairs(normed * (16.0 / largest), STEP))  # 16 * 448 * 8 is less than fp16's largest
            factors = _longer(factors, largest / 16.0)
        else:
            square = tl.sum(x * x, 0)
            found = _longer(found, normed)
            factors = _longer(factors, 1.0)
        squares = _longer(squares, square)
    return found, factors, squares


_WIDENED = tl.constexpr("""{
.reg .b32 lo, hi; .reg .b16 a, b, c, d;
mov.b64 {lo, hi}, $4; mov.b32 {a, b}, lo; mov.b32 {c, d}, hi;
cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d;
}""")
_EIGHT_PRODUCTS = tl.constexpr("""{
.reg .b32 p; .reg .b16 u, v; .reg .f32 f, g;
mul.rn.f16x2 p, $1, $5; fma.rn.f16x2 p, $2, $6, p; fma.rn.f16x2 p, $3, $7, p; fma.rn.f16x2 p, $4, $8, p;
mov.b32 {u, v}, p; cvt.f32.f16 f, u; cvt.f32.f16 g, v; add.f32 $0, f, g;
}""")


@triton.jit
def _sums(piece, inputs, N: tl.constexpr, PACKED: tl.constexpr):
    """Of each token with a piece of the weight."""
    sums = ()
    if PACKED:
        a, b, c, d = tl.inline_asm_elementwise(
            _WIDENED, "=r,=r,=r,=r,l", [piece], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        for n in tl.static_range(N):
            x = inputs[n]
            products = tl.inline_asm_elementwise(
                _EIGHT_PRODUCTS, "=f,r,r,r,r,r,r,r,r",
                [a, b, c, d, x[0][None, :], x[1][None, :], x[2][None, :], x[3][None, :]],
                dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
            sums = _longer(sums, tl.sum(products, 1))
    else:
        weight = piece.to(tl.float32)
        for n in tl.static_range(N):
            sums = _longer(sums, tl.sum(weight * inputs[n][None, :], 1))
    return sums


@triton.jit
def _around(
    group, scales_ptr, onto_ptr, outputs,
    N: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """What a group's sums are multiplied with and added to."""
    row, there = _rows(group, outputs, ROWS, GATED)
    scales = 1.0
    if SCALED:
        scales = tl.load(scales_ptr + row, mask=there, other=0.0)
    ontos = ()
    for n in tl.static_range(N):
        if ADDS:
            o = group * (ROWS // 2) + tl.arange(0, ROWS // 2) if GATED else row
            ontos = _longer(ontos, tl.load(onto_ptr + n * outputs + o, mask=o < outputs, other=0.0).to(tl.float32))
        else:
            ontos = _longer(ontos, 0.0)
    return scales, ontos


@triton.jit
def _thin(
    x_ptr, weight_ptr, scales_ptr, x_scales_ptr, norm_ptr, onto_ptr, out_ptr, eps, outputs, groups, programs,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr,
    X_SCALED: tl.constexpr, NORMED: tl.constexpr, ACTIVATION: tl.constexpr, ADDS: tl.constexpr,
    PACKED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (K + STEP - 1) // STEP
    gated: tl.constexpr = ACTIVATION != ""
    eight: tl.constexpr = 8 if PACKED else 1
    program = tl.program_id(0)
    words = weight_ptr.to(tl.pointer_type(tl.int64), bitcast=True) if PACKED else weight_ptr
    piece = _piece(words, program, 0, outputs, K // eight, ROWS, STEP // eight, gated)
    k = _places(0, STEP, PACKED)
    norm = _norm_weight(norm_ptr, k, K, NORMED)
    begins(DEPENDENT)  # the weight's first rows are on their way before the input is there
    inputs, factors, squares = _inputs(x_ptr, norm, k, N, K, STEP, NORMED, PACKED)
    scales, ontos = _around(program, scales_ptr, onto_ptr, outputs, N, ROWS, gated, SCALED, ADDS)
    for group in range(program, groups, programs):
        totals, lengths = (), ()
        for part in tl.static_range(parts):
            at = group if part + 1 < parts else group + programs
            coming = _piece(words, at, (part + 1) % parts, outputs, K // eight, ROWS, STEP // eight, gated)
            if parts > 1:
                k = _places(part, STEP, PACKED)
                norm = _norm_weight(norm_ptr, k, K, NORMED)
                inputs, factors, squares = _inputs(x_ptr, norm, k, N, K, STEP, NORMED, PACKED)
            sums, new_totals, new_lengths = _sums(piece, inputs, N, PACKED), (), ()
            for n in tl.static_range(N):
                if part == 0:
                    new_totals = _longer(new_totals, sums[n] * factors[n])
                    new_lengths = _longer(new_lengths, squares[n])
                else:
                    new_totals = _longer(new_totals, totals[n] + sums[n] * factors[n])
                    new_lengths = _longer(new_lengths, lengths[n] + squares[n])
            totals, lengths, piece = new_totals, new_lengths, coming
        next_scales, next_ontos = _around(
            group + programs, scales_ptr, onto_ptr, outputs, N, ROWS, gated, SCALED, ADDS
        )  # asked for a group ahead, as the weight is
        for n in tl.static_range(N):
            total = totals[n] * scales if SCALED else totals[n]
            if X_SCALED:
                total *= tl.load(x_scales_ptr + n)
            if NORMED:
                total *= tl.rsqrt(lengths[n] / K + eps)
            if gated:
                gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
                total = activated(gate, ACTIVATION == "silu") * up
                o = group * (ROWS // 2) + tl.arange(0, ROWS // 2)
            else:
                o = group * ROWS + tl.arange(0, ROWS)
            if ADDS:
                total += ontos[n]
            tl.store(out_ptr + n * outputs + o, total.to(out_ptr.dtype.element_ty), mask=o < outputs)
        scales, ontos = next_scales, next_ontos


def thin_product_triton(
    x: Tensor | Rows8,
    weight: ThinWeight,
    dtype: torch.dtype,
    norm: Norm | None = None,
    activation: str | None = None,
    onto_NO: Tensor | None = None,
) -> Tensor:
    """As `thin_product_reference`."""
    x_NK, x_scales = (x.contiguous(), None) if isinstance(x, Tensor) else x
    values_OK, scales_O = weight
    norm_K, eps = (None, 0.0) if norm is None else norm
    (n, k), tile = x_NK.shape, tile_of(values_OK)
    packed = values_OK.dtype is torch.float8_e4m3fn and k % 8 == 0 and not INTERPRETED
    step = step_of(tile, n, k, packed)
    both = 1 if activation is None else 2  # rows for an output
    rows = max(min(tile.numbers // triton.next_power_of_2(k), MOST_ROWS), both)
    outputs = len(values_OK) // both
    groups = triton.cdiv(outputs, rows // both)
    programs = min(groups, PROCESSORS * tile.programs)
    out_NO = torch.empty(n, outputs, dtype=dtype, device=x_NK.device)
    _thin[(programs,)](
        x_NK, values_OK, scales_O, x_scales, norm_K, None if onto_NO is None else onto_NO.contiguous(), out_NO,
        eps, outputs, groups, programs, N=n, K=k, ROWS=rows, STEP=step,
        SCALED=scales_O is not None, X_SCALED=x_scales is not None, NORMED=norm is not None,
        ACTIVATION=activation or "", ADDS=onto_NO is not None, PACKED=packed, num_warps=tile.warps, **dependent(n),
    )  # fmt: skip
    return out_NO
