"""The experts' MLPs in Triton; `fused_moe.py` says what they compute.

Visits are dealt into tiles. A product reads its rows where they are, by the numbers in the tile, and writes them by
visit; tiles without an expert end at once. Between the two products stands the gate, which also rounds, and after them
the sum over each token's visits.

Shapes: M = N * K visits; the others as in `fused_moe.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.activation.gated_act_triton import gate_row
from llmb.ops.dependent_launch import begins, dependent
from llmb.ops.moe.align_triton import Dealt, Tile, deal, rows_of_tile, tile_and_block
from llmb.ops.moe.expert_weights import Stacked
from llmb.ops.moe.fused_moe import Visits
from llmb.ops.moe.fused_moe_fp8_triton import fits_wide, wide_product
from llmb.ops.moe.fused_moe_nvfp4_triton import nvfp4_product
from llmb.ops.quant.activation_quant import GROUP, Activation, Form, Groups8, as_form, room_for

CHANNELS = 1024  # of a token that one program adds up
FEW_VISITS = 128  # of a step so small that its kernels are launched early
MOST_TOKENS = 16384  # computed together; more would fill memory with what is between the products and gain nothing


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


@triton.jit(do_not_specialize=["visits", "tiles"])
def _product_kernel(
    x, x_scales, weight, weight_scales, out, visit_weights, visits_of, expert_of, visits, tiles, outputs, inputs,
    FORM: tl.constexpr, TOP_K: tl.constexpr, WEIGH: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[visit] = x[visit // TOP_K] @ weight[expert].T for a tile of visits to one expert."""
    begins(DEPENDENT)
    tile, block = tile_and_block(tiles, outputs, COLUMNS, BAND)
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
    if FORM == "groups8":
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
        if FORM == "groups8":
            scale = tl.load(x_scale_at, mask=real, other=0.0) * tl.load(weight_scale_at)
            total += tl.dot(left, right) * scale[:, None]
            x_scale_at += 1
            weight_scale_at += 1
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH
    if FORM == "rows8":
        of_row = tl.load(x_scales + row, mask=real, other=0.0)
        total *= of_row[:, None] * tl.load(weight_scales + expert * outputs + output)[None, :]
    if WEIGH:
        total *= tl.load(visit_weights + visit, mask=real, other=0.0)[:, None]
    at = out + visit[:, None] * outputs + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=real[:, None] & (column < outputs)[None, :])


@triton.jit(do_not_specialize=["first", "experts"])
def _gate_kernel(
    both, chosen, out, scales, first, experts,
    F: tl.constexpr, WIDE: tl.constexpr, SILU: tl.constexpr, FORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up of one visit, in the form that the second product wants."""
    begins(DEPENDENT)
    visit = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + visit) - first
    if (expert >= 0) & (expert < experts):
        gate_row(visit, both, out, scales, F, WIDE, SILU, FORM)


@triton.jit(do_not_specialize=["first", "experts"])
def _sum_kernel(
    answers, chosen, out, first, experts, width,
    TOP_K: tl.constexpr, CHANNELS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A token's answers from the experts of this rank, in the order of its visits."""
    begins(DEPENDENT)
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
    tokens, (experts, channels, _) = len(visits.chosen_NK), down.values.shape
    out_NC = torch.empty(tokens, channels, dtype=dtype, device=visits.chosen_NK.device)
    for start in range(0, tokens, MOST_TOKENS):
        some = slice(start, start + MOST_TOKENS)
        weights_NK, chosen_NK = visits.weights_NK[some].contiguous(), visits.chosen_NK[some].contiguous()
        count, top_k = chosen_NK.numel(), chosen_NK.shape[1]
        dealt = deal(chosen_NK, visits.first, experts, rows or rows_of_tile(count, visits.experts))
        both_M2F = product(_rows(x, some), both, dealt, count, top_k, dtype)
        hidden = gate(both_M2F, chosen_NK, visits.first, experts, activation, down.form)
        answers_MC = product(hidden, down, dealt, count, 1, dtype, weights_NK)
        _sum_kernel[len(chosen_NK), triton.cdiv(channels, CHANNELS)](
            answers_MC, chosen_NK, out_NC[some], visits.first, experts, channels, TOP_K=top_k, CHANNELS=CHANNELS,
            **dependent(len(chosen_NK)),
        )  # fmt: skip
    return out_NC


def _rows(x: Activation, some: slice) -> Activation:
    return x[some] if isinstance(x, Tensor) else type(x)(x.values[some], x.scales[some])


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
    if weight.kind == "nvfp4":
        assert isinstance(x, Tensor)
        return nvfp4_product(x, weight, dealt, visits, top_k, dtype, visit_weights)
    if isinstance(x, Groups8) and fits_wide(weight, dealt):
        return wide_product(x, weight, dealt, visits, top_k, dtype, visit_weights)
    values, scales = (x.contiguous(), None) if isinstance(x, Tensor) else (x.values.contiguous(), x.scales.contiguous())
    outputs, inputs = weight.values.shape[1:]
    out_MO = torch.empty(visits, outputs, dtype=dtype, device=values.device)
    shape = (PLAIN_TILES if weight.kind == "plain" else ROUNDED_TILES)[dealt.rows]
    tiles = len(dealt.experts_T)
    _product_kernel[tiles * triton.cdiv(outputs, shape.columns),](
        values, scales, weight.values, weight.scales, out_MO, visit_weights, dealt.visits_P, dealt.experts_T,
        visits, tiles, outputs, inputs,
        FORM=weight.kind, TOP_K=top_k, WEIGH=visit_weights is not None, EVEN=inputs % shape.depth == 0,
        GROUP=GROUP, ROWS=dealt.rows, COLUMNS=shape.columns, DEPTH=shape.depth, BAND=shape.band,
        num_warps=shape.warps, num_stages=shape.stages, **dependent(visits, FEW_VISITS),
    )  # fmt: skip
    return out_MO


def gate(both_M2F: Tensor, chosen_NK: Tensor, first: int, experts: int, activation: str, form: Form) -> Activation:
    """What the second product reads; rows of visits to other ranks' experts stay as they were found."""
    visits, width = len(both_M2F), both_M2F.shape[1] // 2
    out_MF, scales = room_for(visits, width, form, both_M2F)
    wide = max(triton.next_power_of_2(width), GROUP)
    _gate_kernel[visits,](
        both_M2F, chosen_NK, out_MF, scales, first, experts,
        F=width, WIDE=wide, SILU=activation == "silu", FORM=form, num_warps=min(max(wide // 1024, 1), 16),
        **dependent(visits, FEW_VISITS),
    )  # fmt: skip
    return as_form(out_MF, scales, form)
