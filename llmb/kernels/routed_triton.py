"""The experts' MLPs as six Triton kernels; `routed.py` says what they compute.

Two deal the visits: every expert's are put together and filled up to whole tiles of rows, whose number on the host is
the most that so many visits can need. A product reads its rows where they are, by the numbers in the tile, and writes
them by visit; tiles without an expert end at once. Between the two products stands the gate, which also rounds, and
after them the sum over each token's visits.

Shapes: M = N * K visits, T tiles, P = T * rows of a tile; the others as in `routed.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.kernels.forms import E4M3, GROUP, LARGEST, SMALLEST_AMAX, Activation, Form, Groups8, Rows8
from llmb.kernels.routed import Stacked, Visits

FORMS: dict[Form, int] = {"plain": 0, "rows8": 1, "groups8": 2}
CHUNK = 1024  # visits that a program looks at in one go, and channels of a program that computes no product


class Tile(NamedTuple):
    """How much of a product one program computes at a time, and on what of a multiprocessor."""

    columns: int  # for the form groups8 no more than 128, which share a scale
    depth: int  # for the form groups8 128, which share a scale
    warps: int
    stages: int
    band: int  # tiles of rows that are taken before the next columns, so that weights are read while still cached


# By the rows of a tile. Few rows: all is waiting for weights, and many small programs ask for them at once.
PLAIN_TILES = {
    16: Tile(64, 128, 4, 4, 1),
    32: Tile(64, 128, 4, 4, 1),
    64: Tile(128, 64, 4, 4, 8),
    128: Tile(128, 64, 8, 3, 8),
}
ROUNDED_TILES = {
    16: Tile(64, 128, 4, 5, 1),
    32: Tile(64, 128, 4, 5, 1),
    64: Tile(128, 128, 4, 4, 8),
    128: Tile(128, 128, 8, 3, 8),
}


@triton.jit
def _count_kernel(chosen, counts, first, visits, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, visits, CHUNK):
        visit = start + tl.arange(0, CHUNK)
        found += (tl.load(chosen + visit, mask=visit < visits, other=-1) == first + expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


@triton.jit
def _deal_kernel(
    chosen, counts, visits_of, expert_of, first, visits, experts, tiles,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program for each expert, and one more for the tiles that are nobody's."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    tiles_of = tl.cdiv(tl.load(counts + every, mask=every < experts, other=0), ROWS)
    start_tile = tl.sum(tl.where(every < expert, tiles_of, 0))
    own_tiles = tl.sum(tl.where(every == expert, tiles_of, 0))
    end_tile = tl.where(expert < experts, start_tile + own_tiles, tiles)
    name = tl.where(expert < experts, expert, -1)
    if expert < experts:
        place = start_tile * ROWS
        for start in range(0, visits, CHUNK):
            visit = start + tl.arange(0, CHUNK)
            mine = tl.load(chosen + visit, mask=visit < visits, other=-1) == first + expert
            number = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(visits_of + place + number - 1, visit, mask=mine)
            place += tl.sum(mine.to(tl.int32))
        padding = place + tl.arange(0, ROWS)
        tl.store(visits_of + padding, tl.full((ROWS,), visits, tl.int32), mask=padding < end_tile * ROWS)
    for start in range(start_tile, end_tile, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        tl.store(expert_of + tile, tl.zeros((CHUNK,), tl.int32) + name, mask=tile < end_tile)


@triton.jit
def _product_kernel(
    x, x_scales, weight, weight_scales, out, visit_weights, visits_of, expert_of, visits, tiles, outputs, inputs,
    FORM: tl.constexpr, TOP_K: tl.constexpr, WEIGH: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out[visit] = x[visit // TOP_K] @ weight[expert].T for a tile of visits to one expert."""
    across = tl.cdiv(outputs, COLUMNS)
    band, within = tl.program_id(0) // (BAND * across), tl.program_id(0) % (BAND * across)
    height = min(tiles - band * BAND, BAND)
    tile, block = band * BAND + within % height, within // height
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert < 0:
        return
    visit = tl.load(visits_of + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = visit < visits
    row = visit // TOP_K
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    output = column % outputs  # what is beyond the last is computed from others and never stored
    depth = tl.arange(0, DEPTH)
    x_at = x + row[:, None] * inputs + depth[None, :]
    weight_at = weight + expert * outputs * inputs + output[None, :].to(tl.int64) * inputs + depth[:, None]
    if FORM == 2:
        groups = inputs // GROUP
        x_scale_at = x_scales + row * groups
        weight_scale_at = weight_scales + (expert * (outputs // GROUP) + block * COLUMNS // GROUP) * groups
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inputs, DEPTH):
        if EVEN:
            left = tl.load(x_at, mask=real[:, None], other=0.0)
            right = tl.load(weight_at)
        else:
            inside = start + depth < inputs
            left = tl.load(x_at, mask=real[:, None] & inside[None, :], other=0.0)
            right = tl.load(weight_at, mask=inside[:, None], other=0.0)
        if FORM == 2:
            scale = tl.load(x_scale_at, mask=real, other=0.0) * tl.load(weight_scale_at)
            total += tl.dot(left, right) * scale[:, None]
            x_scale_at += 1
            weight_scale_at += 1
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH
    if FORM == 1:
        of_row = tl.load(x_scales + row, mask=real, other=0.0)
        total *= of_row[:, None] * tl.load(weight_scales + expert * outputs + output)[None, :]
    if WEIGH:
        total *= tl.load(visit_weights + visit, mask=real, other=0.0)[:, None]
    at = out + visit[:, None] * outputs + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=real[:, None] & (column < outputs)[None, :])


@triton.jit
def _gate_kernel(
    both, chosen, out, scales, first, experts, width, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    ACTIVATION: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up of one visit, in the form that the second product wants."""
    visit, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    expert = tl.load(chosen + visit) - first
    if (expert < 0) | (expert >= experts):
        return
    channel = chunk * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < width
    at = both + visit * 2 * width + channel
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        hidden = gate * tl.sigmoid(gate) * up
    else:
        tl.static_assert(ACTIVATION == "gelu")
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (gate + 0.044715 gate^3)
        hidden = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    if FORM == 0:
        tl.store(out + visit * width + channel, hidden.to(out.dtype.element_ty), mask=inside)
    elif FORM == 1:
        scale = tl.maximum(tl.max(tl.abs(hidden)), SMALLEST) * (1 / LARGEST)
        rounded = (hidden * (1 / scale)).to(out.dtype.element_ty)
        tl.store(out + visit * width + channel, rounded, mask=inside)
        tl.store(scales + visit, scale)
    else:
        grouped = tl.reshape(hidden, (CHANNELS // GROUP, GROUP))
        scale = tl.maximum(tl.max(tl.abs(grouped), axis=1), SMALLEST) * (1 / LARGEST)
        rounded = (grouped * (1 / scale)[:, None]).to(out.dtype.element_ty)
        tl.store(out + visit * width + channel, tl.reshape(rounded, (CHANNELS,)), mask=inside)
        group = chunk * (CHANNELS // GROUP) + tl.arange(0, CHANNELS // GROUP)
        tl.store(scales + visit * (width // GROUP) + group, scale, mask=group < width // GROUP)


@triton.jit
def _sum_kernel(answers, chosen, out, first, experts, width, TOP_K: tl.constexpr, CHANNELS: tl.constexpr):
    """A token's answers from the experts of this rank, in the order of its visits."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < width
    total = tl.zeros((CHANNELS,), tl.float32)
    for number in range(TOP_K):
        visit = token * TOP_K + number
        expert = tl.load(chosen + visit) - first
        here = (expert >= 0) & (expert < experts)
        total += tl.load(answers + visit * width + channel, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(out + token * width + channel, total.to(out.dtype.element_ty), mask=inside)


class Dealt(NamedTuple):
    """Visits by expert, in whole tiles."""

    visits_P: Tensor  # int32; M where a tile is filled up
    experts_T: Tensor  # int32, counted from this rank's first; -1: nobody's
    rows: int  # of a tile


def most_tiles(visits: int, experts: int, rows: int) -> int:
    """How many tiles so many visits fill at most, when each of as many experts as possible fills up its last one."""
    return (visits + min(experts, visits) * (rows - 1)) // rows


def rows_of_tile(visits: int, experts: int) -> int:
    """The smallest tile that takes an expert's visits when all have equally many."""
    return next((rows for rows in (16, 32, 64) if visits <= rows * experts), 128)


def deal(chosen_NK: Tensor, first: int, experts: int, rows: int) -> Dealt:
    """Which visits each tile holds; `experts` are those of this rank."""
    tokens, top_k = chosen_NK.shape
    tiles = most_tiles(tokens * min(top_k, experts), experts, rows)
    counts_E, visits_P, experts_T = (
        torch.empty(size, dtype=torch.int32, device=chosen_NK.device) for size in (experts, tiles * rows, tiles)
    )
    visits = tokens * top_k
    _count_kernel[experts,](chosen_NK, counts_E, first, visits, CHUNK=CHUNK)
    _deal_kernel[experts + 1,](
        chosen_NK, counts_E, visits_P, experts_T, first, visits, experts, tiles,
        ROWS=rows, EXPERTS=triton.next_power_of_2(experts), CHUNK=CHUNK,
    )  # fmt: skip
    return Dealt(visits_P, experts_T, rows)


def routed_mlp_triton(
    x: Activation,
    visits: Visits,
    both: Stacked,
    down: Stacked,
    activation: str,
    dtype: torch.dtype,
    rows: int | None = None,
) -> Tensor:
    """As `routed.routed_mlp`; `rows` of a tile are found from the number of visits if not given."""
    chosen_NK = visits.chosen_NK.contiguous()
    (tokens, top_k), (experts, channels, _) = chosen_NK.shape, down.values.shape
    out_NC = torch.empty(tokens, channels, dtype=dtype, device=chosen_NK.device)
    if tokens == 0:
        return out_NC
    dealt = deal(chosen_NK, visits.first, experts, rows or rows_of_tile(tokens * top_k, visits.experts))
    both_M2F = product(x, both, dealt, tokens * top_k, top_k, dtype)
    hidden = gate(both_M2F, chosen_NK, visits.first, experts, activation, down.form)
    answers_MC = product(hidden, down, dealt, tokens * top_k, 1, dtype, visits.weights_NK.contiguous())
    _sum_kernel[tokens, triton.cdiv(channels, CHUNK)](
        answers_MC, chosen_NK, out_NC, visits.first, experts, channels, TOP_K=top_k, CHANNELS=CHUNK
    )
    return out_NC


def product(
    x: Activation,
    weight: Stacked,
    dealt: Dealt,
    visits: int,
    top_k: int,
    dtype: torch.dtype,
    visit_weights: Tensor | None = None,
) -> Tensor:
    """The product of every visit, [M, O]; x has a row for each `top_k` of them."""
    values, scales = (x.contiguous(), None) if isinstance(x, Tensor) else (x.values.contiguous(), x.scales.contiguous())
    _, outputs, inputs = weight.values.shape
    out_MO = torch.empty(visits, outputs, dtype=dtype, device=values.device)
    shape = (PLAIN_TILES if weight.scales is None else ROUNDED_TILES)[dealt.rows]
    tiles = len(dealt.experts_T)
    _product_kernel[tiles * triton.cdiv(outputs, shape.columns),](
        values, scales, weight.values, weight.scales, out_MO, visit_weights, dealt.visits_P, dealt.experts_T,
        visits, tiles, outputs, inputs,
        FORM=FORMS[weight.form], TOP_K=top_k, WEIGH=visit_weights is not None, EVEN=inputs % shape.depth == 0,
        GROUP=GROUP, ROWS=dealt.rows, COLUMNS=shape.columns, DEPTH=shape.depth, BAND=shape.band,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out_MO


def gate(both_M2F: Tensor, chosen_NK: Tensor, first: int, experts: int, activation: str, form: Form) -> Activation:
    """What the second product reads; rows of visits to other ranks' experts stay as they were found."""
    visits, width = len(both_M2F), both_M2F.shape[1] // 2
    device = both_M2F.device
    out_MF = torch.empty(visits, width, dtype=both_M2F.dtype if form == "plain" else E4M3, device=device)
    scales = torch.empty(visits, width // GROUP if form == "groups8" else 1, dtype=torch.float32, device=device)
    channels = triton.next_power_of_2(width) if form == "rows8" else CHUNK  # a row's scale needs the whole row
    _gate_kernel[visits, triton.cdiv(width, channels)](
        both_M2F, chosen_NK, out_MF, scales, first, experts, width, LARGEST=LARGEST, SMALLEST=SMALLEST_AMAX,
        ACTIVATION=activation, FORM=FORMS[form], GROUP=GROUP, CHANNELS=channels,
        num_warps=16 if channels > 8 * CHUNK else 4,
    )  # fmt: skip
    if form == "plain":
        return out_MF
    return Rows8(out_MF, scales) if form == "rows8" else Groups8(out_MF, scales)
