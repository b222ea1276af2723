"""MoE GEMM for many rows per expert, FP8 with a scale per 128 channels: compute-bound.

A program computes 256 columns as two halves. Each 128 channels are accumulated by the tensor cores and then added to
the total with their scales; two halves in turn need the registers of only one unscaled accumulator, and the rows are
read once for both. So a tile is wide enough for the L2 cache to keep up, which narrower ones outrun.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.moe.align_triton import AlignedBlocks, grouped_pids
from llmb.ops.moe.expert_weights import ExpertWeights
from llmb.ops.quant.activation_quant import GROUP, GroupFp8

BLOCK_M = 128  # the block size from which this kernel is the faster
BLOCK_N = 2 * GROUP
GROUP_M, WARPS, STAGES = 8, 8, 3


@triton.jit(do_not_specialize=["pairs", "num_blocks"])
def _moe_gemm_fp8_kernel(
    x, x_scales, weight, weight_scales, out, topk_weights, sorted_token_ids, expert_ids, pairs, num_blocks,
    outputs, inputs,
    TOP_K: tl.constexpr, MUL_ROUTED_WEIGHT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // TOP_K] @ weight[expert].T for a block of pairs of one expert."""
    pid_m, pid_n = grouped_pids(tl.program_id(0), num_blocks, outputs, 2 * GROUP, GROUP_M)
    expert = tl.load(expert_ids + pid_m).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_token_ids + pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    valid = pair < pairs
    row = tl.where(valid, pair // TOP_K, 0)  # padding is computed from some row and never stored
    k, column = tl.arange(0, GROUP), pid_n * 2 * GROUP + tl.arange(0, GROUP)
    groups = inputs // GROUP
    x_ptrs = x + row[:, None] * inputs + k[None, :]
    weight_ptrs = weight + (expert * outputs + column)[None, :] * inputs + k[:, None]
    x_scale_ptrs = x_scales + row * groups
    weight_scale_ptr = weight_scales + (expert * (outputs // GROUP) + pid_n * 2) * groups
    acc0 = tl.zeros((BLOCK_M, GROUP), tl.float32)
    acc1 = tl.zeros((BLOCK_M, GROUP), tl.float32)
    for _ in range(groups):
        x_block = tl.load(x_ptrs)
        scale = tl.load(x_scale_ptrs)
        acc0 += tl.dot(x_block, tl.load(weight_ptrs)) * (scale * tl.load(weight_scale_ptr))[:, None]
        weight1 = tl.load(weight_ptrs + GROUP * inputs)
        acc1 += tl.dot(x_block, weight1) * (scale * tl.load(weight_scale_ptr + groups))[:, None]
        x_ptrs += GROUP
        weight_ptrs += GROUP
        x_scale_ptrs += 1
        weight_scale_ptr += 1
    if MUL_ROUTED_WEIGHT:
        routed_weight = tl.load(topk_weights + pair, mask=valid, other=0.0)[:, None]
        acc0 *= routed_weight
        acc1 *= routed_weight
    out_ptrs = out + pair[:, None] * outputs + column[None, :]
    tl.store(out_ptrs, acc0.to(out.dtype.element_ty), mask=valid[:, None])
    tl.store(out_ptrs + GROUP, acc1.to(out.dtype.element_ty), mask=valid[:, None])


def fits_large_m(weight: ExpertWeights, blocks: AlignedBlocks) -> bool:
    """Return whether a GEMM should take this kernel, which adds no bias."""
    fits = weight.values.shape[1] % BLOCK_N == 0 and weight.bias is None
    return weight.format == "1x128" and blocks.block_size == BLOCK_M and fits


def large_m_gemm(
    x: GroupFp8,
    weight: ExpertWeights,
    blocks: AlignedBlocks,
    pairs: int,
    top_k: int,
    dtype: torch.dtype,
    topk_weights: Tensor | None,
) -> Tensor:
    """See `fused_moe_triton.moe_gemm`."""
    outputs, inputs = weight.values.shape[1:]
    out_MO = torch.empty(pairs, outputs, dtype=dtype, device=x.values.device)
    num_blocks = len(blocks.expert_ids_T)
    _moe_gemm_fp8_kernel[num_blocks * (outputs // BLOCK_N),](
        x.values.contiguous(), x.scales.contiguous(), weight.values, weight.scales, out_MO, topk_weights,
        blocks.sorted_token_ids_P, blocks.expert_ids_T, pairs, num_blocks, outputs, inputs,
        TOP_K=top_k, MUL_ROUTED_WEIGHT=topk_weights is not None, GROUP=GROUP, BLOCK_M=BLOCK_M, GROUP_M=GROUP_M,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_MO
