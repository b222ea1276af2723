"""The product of many visits to each expert, in 8 bits with a scale for each 128 channels: bound by arithmetic.

A program computes 256 columns as two halves. Each 128 channels are summed by the tensor cores and then added to the
total with their scales; two halves in turn need the registers of only one unscaled sum, and the rows are read once for
both. So a tile is wide enough for the second-level cache to keep up, which narrower ones outrun.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.moe.align_triton import Dealt, tile_and_block
from llmb.ops.moe.expert_weights import Stacked
from llmb.ops.quant.activation_quant import GROUP, Groups8

ROWS = 128  # of a tile from which this way is the faster
COLUMNS = 2 * GROUP
BAND, WARPS, STAGES = 8, 8, 3


@triton.jit(do_not_specialize=["visits", "tiles"])
def _wide_kernel(
    x, x_scales, weight, weight_scales, out, visit_weights, visits_of, expert_of, visits, tiles, outputs, inputs,
    TOP_K: tl.constexpr, WEIGH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out[visit] = x[visit // TOP_K] @ weight[expert].T for a tile of visits to one expert."""
    tile, block = tile_and_block(tiles, outputs, 2 * GROUP, BAND)
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert < 0:
        return
    visit = tl.load(visits_of + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = visit < visits
    row = tl.where(real, visit // TOP_K, 0)  # what fills a tile up is computed from some row and never stored
    depth, column = tl.arange(0, GROUP), block * 2 * GROUP + tl.arange(0, GROUP)
    groups = inputs // GROUP
    x_at = x + row[:, None] * inputs + depth[None, :]
    weight_at = weight + (expert * outputs + column)[None, :] * inputs + depth[:, None]
    x_scale_at = x_scales + row * groups
    weight_scale_at = weight_scales + (expert * (outputs // GROUP) + block * 2) * groups
    first = tl.zeros((ROWS, GROUP), tl.float32)
    second = tl.zeros((ROWS, GROUP), tl.float32)
    for _ in range(groups):
        left = tl.load(x_at)
        scale = tl.load(x_scale_at)
        first += tl.dot(left, tl.load(weight_at)) * (scale * tl.load(weight_scale_at))[:, None]
        other = tl.load(weight_at + GROUP * inputs)
        second += tl.dot(left, other) * (scale * tl.load(weight_scale_at + groups))[:, None]
        x_at += GROUP
        weight_at += GROUP
        x_scale_at += 1
        weight_scale_at += 1
    if WEIGH:
        of_visit = tl.load(visit_weights + visit, mask=real, other=0.0)[:, None]
        first *= of_visit
        second *= of_visit
    at = out + visit[:, None] * outputs + column[None, :]
    tl.store(at, first.to(out.dtype.element_ty), mask=real[:, None])
    tl.store(at + GROUP, second.to(out.dtype.element_ty), mask=real[:, None])


def fits_wide(weight: Stacked, dealt: Dealt) -> bool:
    """Whether a product should be computed this way."""
    return weight.kind == "groups8" and dealt.rows == ROWS and weight.values.shape[1] % COLUMNS == 0


def wide_product(
    x: Groups8,
    weight: Stacked,
    dealt: Dealt,
    visits: int,
    top_k: int,
    dtype: torch.dtype,
    visit_weights: Tensor | None,
) -> Tensor:
    """As `routed_triton.product`."""
    outputs, inputs = weight.values.shape[1:]
    out_MO = torch.empty(visits, outputs, dtype=dtype, device=x.values.device)
    tiles = len(dealt.experts_T)
    _wide_kernel[tiles * (outputs // COLUMNS),](
        x.values.contiguous(), x.scales.contiguous(), weight.values, weight.scales, out_MO, visit_weights,
        dealt.visits_P, dealt.experts_T, visits, tiles, outputs, inputs,
        TOP_K=top_k, WEIGH=visit_weights is not None, GROUP=GROUP, ROWS=ROWS, BAND=BAND,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_MO
