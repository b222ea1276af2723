"""Triton for linear layers of a handful of tokens: a program sums a few rows of the weight over all inputs.

The rows of a gated pair lie side by side in a program, gate and up in turn, so that it can make one number of them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.kernels.dependent_launch import begins, dependent
from llmb.kernels.forms import Rows8
from llmb.kernels.thin import Norm, ThinWeight


class Tile(NamedTuple):
    """What a program holds of the weight at a time; the first such piece is read before its turn comes."""

    rows: int
    step: int
    warps: int


# The fastest measured on an H200 for one token, by the bytes of a number and how many outputs there are for an input.
TILES = {
    2: {"few": Tile(1, 2048, 2), "as many": Tile(2, 2048, 4), "more": Tile(8, 1024, 2), "many": Tile(4, 4096, 4)},
    1: {"few": Tile(2, 2048, 2), "as many": Tile(4, 2048, 4), "more": Tile(8, 2048, 4), "many": Tile(2, 2048, 2)},
}
AHEAD = True  # whether a program asks the L2 cache for the rest of its rows before its turn comes
LINE_BYTES = 128  # of that cache
OUTPUTS_PER_INPUT = {"few": 0.5, "as many": 1.0, "more": 2.0}  # at most; down, o, qkv; then gate with up, and heads


def tile_of(values_OK: Tensor) -> Tile:
    """For a weight of this shape and format."""
    outputs, inputs = values_OK.shape
    kind = next((kind for kind, most in OUTPUTS_PER_INPUT.items() if outputs <= most * inputs), "many")
    tile = TILES[min(values_OK.itemsize, 2)][kind]
    return tile._replace(step=min(tile.step, max(triton.next_power_of_2(inputs), 32 * tile.warps)))


@triton.jit
def _piece(rows, there, k, K: tl.constexpr):
    """Of some rows of the weight, those columns."""
    return tl.load(rows + k[None, :], mask=there & (k < K)[None, :], other=0.0)


@triton.jit
def _prefetch(rows, STEP: tl.constexpr, K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """What comes after the first piece, on its way to the L2 cache."""
    at = rows + tl.minimum(STEP + tl.arange(0, LINES) * LINE, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _longer(many, one):
    """A tuple with one more at its end."""
    many += (one,)
    return many


@triton.jit
def _added(totals, squares, piece, x_ptr, norm_ptr, k, N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr):
    """The sums of each token with one piece more of the weight, and of its inputs' squares."""
    new_totals, new_squares = (), ()
    weight = piece.to(tl.float32)
    for n in tl.static_range(N):
        x = tl.load(x_ptr + n * K + k, mask=k < K, other=0.0).to(tl.float32)
        if NORMED:
            new_squares = _longer(new_squares, squares[n] + tl.sum(x * x, 0))
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        else:
            new_squares = _longer(new_squares, squares[n])
        new_totals = _longer(new_totals, totals[n] + tl.sum(weight * x[None, :], 1))
    return new_totals, new_squares


@triton.jit
def _thin(
    x_ptr,
    weight_ptr,
    scales_ptr,
    x_scales_ptr,
    norm_ptr,
    onto_ptr,
    out_ptr,
    eps,
    outputs,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    SCALED: tl.constexpr,
    X_SCALED: tl.constexpr,
    NORMED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i = tl.arange(0, ROWS)
    if ACTIVATION == "":
        o = tl.program_id(0) * ROWS + i
        r = o
        there = o < outputs
    else:
        o = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        pair = tl.program_id(0) * (ROWS // 2) + i // 2
        r = pair + (i % 2) * outputs
        there = pair < outputs
    k = tl.arange(0, STEP)
    rows = weight_ptr + r.to(tl.int64)[:, None] * K
    piece = _piece(rows, there[:, None], k, K)
    scales = 1.0
    if SCALED:
        scales = tl.load(scales_ptr + r, mask=there, other=0.0)
    if LINES > 0:
        _prefetch(weight_ptr + tl.where(there, r, 0).to(tl.int64)[:, None] * K, STEP, K, LINE, LINES)
    begins(DEPENDENT)  # the weight's first piece is on its way before the input is there
    totals, squares = (), ()
    for _ in tl.static_range(N):
        totals = _longer(totals, tl.zeros([ROWS], tl.float32))
        squares = _longer(squares, 0.0)
    totals, squares = _added(totals, squares, piece, x_ptr, norm_ptr, k, N, K, NORMED)
    for begin in range(STEP, K, STEP):
        piece = _piece(rows, there[:, None], begin + k, K)
        totals, squares = _added(totals, squares, piece, x_ptr, norm_ptr, begin + k, N, K, NORMED)
    for n in tl.static_range(N):
        total = totals[n] * scales
        if X_SCALED:
            total *= tl.load(x_scales_ptr + n)
        if NORMED:
            total *= tl.rsqrt(squares[n] / K + eps)
        if ACTIVATION != "":
            gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
            if ACTIVATION == "silu":
                total = gate * tl.sigmoid(gate) * up
            else:  # gelu's tanh form: tanh(y) = 2 * sigmoid(2 y) - 1
                total = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
        if ADDS:
            total += tl.load(onto_ptr + n * outputs + o, mask=o < outputs, other=0.0).to(tl.float32)
        tl.store(out_ptr + n * outputs + o, total.to(out_ptr.dtype.element_ty), mask=o < outputs)


def lines_ahead(values_OK: Tensor, tile: Tile) -> int:
    """Lines of the L2 cache that a row has beyond its first piece, up to a power of two."""
    rest = (values_OK.shape[1] - tile.step) * values_OK.itemsize
    return triton.next_power_of_2(triton.cdiv(rest, LINE_BYTES)) if AHEAD and rest > 0 else 0


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
    (n, k), tile, launch = x_NK.shape, tile_of(values_OK), dependent(len(x_NK))
    outputs, rows = len(values_OK), tile.rows
    if activation is not None:
        outputs, rows = outputs // 2, max(rows // 2, 1)
    out_NO = torch.empty(n, outputs, dtype=dtype, device=x_NK.device)
    _thin[(triton.cdiv(outputs, rows),)](
        x_NK, values_OK, scales_O, x_scales, norm_K, None if onto_NO is None else onto_NO.contiguous(), out_NO,
        eps, outputs, N=n, K=k, ROWS=rows if activation is None else 2 * rows, STEP=tile.step,
        LINE=LINE_BYTES // values_OK.itemsize, LINES=lines_ahead(values_OK, tile) if launch["DEPENDENT"] else 0,
        SCALED=scales_O is not None, X_SCALED=x_scales is not None, NORMED=norm is not None,
        ACTIVATION=activation or "", ADDS=onto_NO is not None, num_warps=tile.warps, **launch,
    )  # fmt: skip
    return out_NO
