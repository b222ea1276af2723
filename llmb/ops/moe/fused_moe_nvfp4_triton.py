"""The experts' products with weights in 4 bits (`nvfp4.py`) and plain activations, in Triton.

Weights are widened in registers, tile by tile: a code's exponent and mantissa are put where fp32 has its own, and one
product with the group's scale puts the exponents right. So the weights take a quarter of the memory of bf16. They are
the left side of the product, which the hardware takes from registers; its outcome is a transposed tile.

Shapes: as in `fused_moe_triton.py`; O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.moe.align_triton import Dealt, Tile, tile_and_block
from llmb.ops.moe.expert_weights import Stacked
from llmb.ops.quant.nvfp4 import NVFP4_GROUP

TILES = {
    16: Tile(64, 128, 4, 4, 1),
    32: Tile(64, 128, 4, 4, 1),
    64: Tile(128, 64, 8, 4, 8),
    128: Tile(128, 64, 8, 3, 8),
}
# fp32 has a bias of 127, e2m1 of 1: 2^126 puts it right. With a scale of up to 448 that would be too large, so a part
# of it waits for the end.
NOW, LATER = tl.constexpr(2.0**118), tl.constexpr(2.0**8)


@triton.jit
def _number(code, scale, GROUPS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers / 256 of codes [COLUMNS, GROUPS * HALF], of which HALF at a time share a scale."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    small = tl.reshape(bits.to(tl.float32, bitcast=True), (COLUMNS, GROUPS, HALF))
    return tl.reshape(small * scale[:, :, None], (COLUMNS, GROUPS * HALF))


@triton.jit(do_not_specialize=["visits", "tiles"])
def _product_kernel(
    x, weight, scales, factors, out, visit_weights, visits_of, expert_of, visits, tiles, outputs, inputs,
    TOP_K: tl.constexpr, WEIGH: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out[visit] = x[visit // TOP_K] @ weight[expert].T for a tile of visits to one expert."""
    tile, block = tile_and_block(tiles, outputs, COLUMNS, BAND)
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert < 0:
        return
    visit = tl.load(visits_of + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = visit < visits
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    output = expert * outputs + column % outputs  # what is beyond the last is computed from others and never stored
    depth, byte, group = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // GROUP)
    x_at = x + (visit // TOP_K)[None, :] * inputs + depth[:, None]
    weight_at = weight + output[:, None] * (inputs // 2) + byte[None, :]
    scale_at = scales + output[:, None] * (inputs // GROUP) + group[None, :]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, inputs, DEPTH):
        if EVEN:
            right = tl.load(x_at, mask=real[None, :], other=0.0)
            packed = tl.load(weight_at)
            scale = tl.load(scale_at)
        else:
            right = tl.load(x_at, mask=real[None, :] & (start + depth < inputs)[:, None], other=0.0)
            packed = tl.load(weight_at, mask=(start + 2 * byte < inputs)[None, :], other=0)
            scale = tl.load(scale_at, mask=(start + GROUP * group < inputs)[None, :], other=0.0)
        packed, scale = packed.to(tl.int32), scale.to(tl.float32) * NOW
        even = _number(packed & 15, scale, DEPTH // GROUP, GROUP // 2, COLUMNS).to(x.dtype.element_ty)
        odd = _number(packed >> 4, scale, DEPTH // GROUP, GROUP // 2, COLUMNS).to(x.dtype.element_ty)
        total = tl.dot(tl.interleave(even, odd), right, total, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH // 2
        scale_at += DEPTH // GROUP
    total *= (tl.load(factors + output) * LATER)[:, None]
    if WEIGH:
        total *= tl.load(visit_weights + visit, mask=real, other=0.0)[None, :]
    at = out + visit[None, :] * outputs + column[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=real[None, :] & (column < outputs)[:, None])


def nvfp4_product(
    x: Tensor,
    weight: Stacked,
    dealt: Dealt,
    visits: int,
    top_k: int,
    dtype: torch.dtype,
    visit_weights: Tensor | None = None,
) -> Tensor:
    """As `routed_triton.product`."""
    outputs, inputs = weight.values.shape[1], weight.inputs
    out_MO = torch.empty(visits, outputs, dtype=dtype, device=x.device)
    shape, tiles = TILES[dealt.rows], len(dealt.experts_T)
    _product_kernel[tiles * triton.cdiv(outputs, shape.columns),](
        x.contiguous(), weight.values, weight.scales, weight.factors, out_MO, visit_weights,
        dealt.visits_P, dealt.experts_T, visits, tiles, outputs, inputs,
        TOP_K=top_k, WEIGH=visit_weights is not None, EVEN=inputs % shape.depth == 0, GROUP=NVFP4_GROUP,
        ROWS=dealt.rows, COLUMNS=shape.columns, DEPTH=shape.depth, BAND=shape.band,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out_MO
