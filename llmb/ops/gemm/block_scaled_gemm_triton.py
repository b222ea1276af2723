"""The product with block-scaled weights for few tokens: as fast as the weight can be read from memory.

A program makes a tile of outputs for a tile of tokens, 128 inputs at a time: the hardware adds those, the program adds
the scaled sums in fp32. Outputs take the rows of the hardware's product, because there are many of them however few
tokens there are. A layer with too few outputs to busy the GPU is also cut along its inputs, and the parts are added
afterwards in a fixed order, so that the same step gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import begins, dependent
from llmb.ops.gemm.block_scaled_gemm import Blocks8
from llmb.ops.quant.activation_quant import GROUP, Groups8

OUTPUTS = 64  # of a tile: half a block of scales
ADDED = 256  # outputs whose parts one program adds
PROGRAMS = 512  # about four for each multiprocessor keep enough reads under way


@triton.jit
def _tile(x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, N, WIDTH, K, GROUPS, EACH, scale_n, scale_g, scale_b,
          OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    k = tl.arange(0, GROUP)
    is_token = n < N
    # The last block of a weight is whole in memory, so its rows are read without a mask.
    w_row = w_ptr + o[:, None].to(tl.int64) * K + k[None, :]
    x_column = x_ptr + n[None, :].to(tl.int64) * K + k[:, None]
    w_scale_row = w_scale_ptr + tl.program_id(0) * OUTPUTS // GROUP * scale_b
    first = part * EACH
    w = tl.load(w_row + first * GROUP)  # on its way before the input is there
    begins(DEPENDENT)
    x = tl.load(x_column + first * GROUP, mask=is_token[None, :], other=0.0)
    x_scale = tl.load(x_scale_ptr + n * scale_n + first * scale_g, mask=is_token, other=0.0)
    total = tl.dot(w, x) * (tl.load(w_scale_row + first) * x_scale)[None, :]
    for group in range(first + 1, tl.minimum(first + EACH, GROUPS)):
        w = tl.load(w_row + group * GROUP)
        x = tl.load(x_column + group * GROUP, mask=is_token[None, :], other=0.0)
        x_scale = tl.load(x_scale_ptr + n * scale_n + group * scale_g, mask=is_token, other=0.0)
        total += tl.dot(w, x) * (tl.load(w_scale_row + group) * x_scale)[None, :]
    place = (part * N + n[None, :]).to(tl.int64) * WIDTH + o[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_token[None, :] & (o[:, None] < WIDTH))


@triton.jit
def _add_parts(parts_ptr, out_ptr, SIZE, PARTS: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr):
    begins(DEPENDENT)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * SIZE + place, mask=place < SIZE, other=0.0)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=place < SIZE)


def block_product_triton(x: Groups8, weight: Blocks8, outputs: int, dtype: torch.dtype) -> Tensor:
    """x @ weight.T, [N, outputs]."""
    tokens, inputs = x.values.shape
    groups = inputs // GROUP
    tile = max(16, min(64, triton.next_power_of_2(tokens)))
    tiles = (triton.cdiv(outputs, OUTPUTS), triton.cdiv(tokens, tile))
    each = triton.cdiv(groups, parts_of(tokens, groups, tiles[0] * tiles[1]))
    parts = triton.cdiv(groups, each)
    shape, form = ((tokens, outputs), dtype) if parts == 1 else ((parts, tokens, outputs), torch.float32)
    out = torch.empty(shape, dtype=form, device=x.values.device)
    _tile[(*tiles, parts)](
        x.values, x.scales, weight.values, weight.scales, out,
        tokens, outputs, inputs, groups, each, *x.scales.stride(), weight.scales.stride(0),
        OUTPUTS=OUTPUTS, TOKENS=tile, GROUP=GROUP, num_warps=4, num_stages=4, **dependent(tokens),
    )  # fmt: skip
    return out if parts == 1 else _added(out, dtype)


def _added(parts_PNO: Tensor, dtype: torch.dtype) -> Tensor:
    parts, tokens, outputs = parts_PNO.shape
    out_NO = torch.empty(tokens, outputs, dtype=dtype, device=parts_PNO.device)
    size = tokens * outputs
    _add_parts[(triton.cdiv(size, ADDED),)](
        parts_PNO, out_NO, size, PARTS=parts, TILE=ADDED, num_warps=2, **dependent(tokens)
    )
    return out_NO


def parts_of(tokens: int, groups: int, tiles: int) -> int:
    """Into how many the inputs are cut: enough programs, but the sums in fp32 stay small beside the weight."""
    wanted = PROGRAMS // max(tiles, 1)
    affordable = groups * GROUP // (32 * max(tokens, 1))  # written and read, 8 bytes each: a quarter of the weight
    return max(1, min(wanted, affordable, groups // 2))
