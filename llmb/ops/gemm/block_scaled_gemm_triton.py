"""Triton GEMM with block-scaled weights for few tokens: as fast as the weight can be read from memory.

A program computes a tile of outputs for a tile of tokens, 128 inputs at a time: the hardware adds those, the program
adds the scaled partial sums in fp32. Outputs are the M dimension of the MMA, because there are many of them however few
tokens there are. A layer with too few outputs to fill the GPU uses split-K, whose partial results are added afterwards
in a fixed order, so that the same step gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.gemm.block_scaled_gemm import BlockScaledWeight
from llmb.ops.quant.activation_quant import GROUP, GroupFp8

OUTPUTS = 64  # of a tile: half a block of scales
REDUCE_TILE = 256  # outputs whose splits one program adds
MAX_PROGRAMS = 512  # about four for each multiprocessor keep enough loads in flight


@triton.jit
def _block_scaled_mm(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, N, WIDTH, K, GROUPS, GROUPS_PER_SPLIT, scale_n, scale_g, scale_b,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    k = tl.arange(0, GROUP)
    is_token = n < N
    # The last block of a weight is whole in memory, so its rows are read without a mask.
    w_row = w_ptr + o[:, None].to(tl.int64) * K + k[None, :]
    x_column = x_ptr + n[None, :].to(tl.int64) * K + k[:, None]
    w_scale_row = w_scale_ptr + tl.program_id(0) * OUTPUTS // GROUP * scale_b
    first_group = split * GROUPS_PER_SPLIT
    w = tl.load(w_row + first_group * GROUP)  # prefetched before the activation is written
    pdl_wait(USE_PDL)
    x = tl.load(x_column + first_group * GROUP, mask=is_token[None, :], other=0.0)
    x_scale = tl.load(x_scale_ptr + n * scale_n + first_group * scale_g, mask=is_token, other=0.0)
    acc = tl.dot(w, x) * (tl.load(w_scale_row + first_group) * x_scale)[None, :]
    for group in range(first_group + 1, tl.minimum(first_group + GROUPS_PER_SPLIT, GROUPS)):
        w = tl.load(w_row + group * GROUP)
        x = tl.load(x_column + group * GROUP, mask=is_token[None, :], other=0.0)
        x_scale = tl.load(x_scale_ptr + n * scale_n + group * scale_g, mask=is_token, other=0.0)
        acc += tl.dot(w, x) * (tl.load(w_scale_row + group) * x_scale)[None, :]
    offset = (split * N + n[None, :]).to(tl.int64) * WIDTH + o[:, None]
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=is_token[None, :] & (o[:, None] < WIDTH))


@triton.jit
def _split_k_reduce(splits_ptr, out_ptr, SIZE, SPLITS: tl.constexpr, TILE: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE,), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(splits_ptr + split * SIZE + offset, mask=offset < SIZE, other=0.0)
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=offset < SIZE)


def block_scaled_mm_triton(x: GroupFp8, weight: BlockScaledWeight, outputs: int, dtype: torch.dtype) -> Tensor:
    """Compute `block_scaled_mm`."""
    tokens, inputs = x.values.shape
    groups = inputs // GROUP
    tile = max(16, min(64, triton.next_power_of_2(tokens)))
    tiles = (triton.cdiv(outputs, OUTPUTS), triton.cdiv(tokens, tile))
    groups_per_split = triton.cdiv(groups, num_k_splits(tokens, groups, tiles[0] * tiles[1]))
    splits = triton.cdiv(groups, groups_per_split)
    shape, out_dtype = ((tokens, outputs), dtype) if splits == 1 else ((splits, tokens, outputs), torch.float32)
    out = torch.empty(shape, dtype=out_dtype, device=x.values.device)
    _block_scaled_mm[(*tiles, splits)](
        x.values, x.scales, weight.values, weight.scales, out,
        tokens, outputs, inputs, groups, groups_per_split, *x.scales.stride(), weight.scales.stride(0),
        OUTPUTS=OUTPUTS, TOKENS=tile, GROUP=GROUP, num_warps=4, num_stages=4, **pdl_options(tokens),
    )  # fmt: skip
    return out if splits == 1 else _reduce_splits(out, dtype)


def _reduce_splits(splits_SNO: Tensor, dtype: torch.dtype) -> Tensor:
    splits, tokens, outputs = splits_SNO.shape
    out_NO = torch.empty(tokens, outputs, dtype=dtype, device=splits_SNO.device)
    size = tokens * outputs
    _split_k_reduce[(triton.cdiv(size, REDUCE_TILE),)](
        splits_SNO, out_NO, size, SPLITS=splits, TILE=REDUCE_TILE, num_warps=2, **pdl_options(tokens)
    )
    return out_NO


def num_k_splits(tokens: int, groups: int, tiles: int) -> int:
    """Return how many splits of K give enough programs while the fp32 partial results stay small beside the weight."""
    filling = MAX_PROGRAMS // max(tiles, 1)
    affordable = groups * GROUP // (32 * max(tokens, 1))  # written and read, 8 bytes each: a quarter of the weight
    return max(1, min(filling, affordable, groups // 2))
