"""MoE GEMM for many rows per expert, FP8 with a scale per 128 channels, as a persistent kernel.

A program computes many tiles, of 6 to 16 steps in small experts, and loads the first blocks of the next one while it
stores the last. Weights come by tensor descriptors, which take one thread instead of all; rows by pointers, as they
are gathered.

Each 128 channels are accumulated by the tensor cores and then added to the total with their scales. With 128 rows a
tile has 256 columns as two halves: two halves in turn need the registers of only one unscaled accumulator, and the
rows are read once for both, so that the L2 cache keeps up, which narrower tiles outrun. With 64 rows the kernel waits
for weights: two programs with 128 columns each share a multiprocessor.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from llmb.ops.device_capabilities import capabilities
from llmb.ops.moe.align_triton import AlignedBlocks, grouped_pids
from llmb.ops.moe.expert_weights import ExpertWeights
from llmb.ops.quant.activation_quant import GROUP, GroupFp8

GROUP_M = 8  # blocks of rows computed before the next columns, so that weights are reused from cache


class PersistentConfig(NamedTuple):
    """Tile and launch options of a block size."""

    halves: int  # of 128 columns
    num_warps: int
    num_stages: int
    programs: int  # of a multiprocessor at a time

    def shared_bytes(self, block_m: int) -> int:
        """Return the most shared memory of a program: the stages of its pipeline, and a half that is being stored."""
        return self.num_stages * (block_m + self.halves * GROUP) * GROUP + 2 * block_m * GROUP


CONFIGS = {64: PersistentConfig(1, 4, 4, 2), 128: PersistentConfig(2, 8, 3, 1)}


@triton.jit(do_not_specialize=["pairs"])
def _moe_gemm_fp8_kernel(
    x, x_scales, weight, weight_scales, out, topk_weights, sorted_token_ids, expert_ids, used_blocks, pairs,
    outputs, inputs,
    TOP_K: tl.constexpr, MUL_ROUTED_WEIGHT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    HALVES: tl.constexpr, GROUP_M: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // TOP_K] @ weight[expert].T for blocks of pairs, each of one expert."""
    num_blocks = tl.load(used_blocks)
    tiles = num_blocks * (outputs // (HALVES * GROUP))
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, GROUP)
    groups = inputs // GROUP
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_pids(tile, num_blocks, outputs, HALVES * GROUP, GROUP_M)
        expert = tl.load(expert_ids + pid_m)
        pair = tl.load(sorted_token_ids + pid_m * BLOCK_M + m)
        valid = pair < pairs
        row = (tl.where(valid, pair, 0) // TOP_K).to(OFFSET)  # scales of padding are some row's, its values zeros
        output = expert * outputs + pid_n * (HALVES * GROUP)
        x_ptrs = x + (row[:, None] * inputs + k[None, :])
        weight_scale_ptr = weight_scales + output // GROUP * groups
        acc0 = tl.zeros((BLOCK_M, GROUP), tl.float32)
        if HALVES == 2:
            acc1 = tl.zeros((BLOCK_M, GROUP), tl.float32)
        for group in range(groups):
            x_block = tl.load(x_ptrs + group * GROUP, mask=valid[:, None], other=0.0)
            scale = tl.load(x_scales + row * groups + group)
            weight0 = weight.load([output, group * GROUP])
            acc0 += tl.dot(x_block, weight0.T) * (scale * tl.load(weight_scale_ptr + group))[:, None]
            if HALVES == 2:
                weight1 = weight.load([output + GROUP, group * GROUP])
                acc1 += tl.dot(x_block, weight1.T) * (scale * tl.load(weight_scale_ptr + groups + group))[:, None]
        if MUL_ROUTED_WEIGHT:
            routed_weight = tl.load(topk_weights + pair, mask=valid, other=0.0)[:, None]
            acc0 *= routed_weight
            if HALVES == 2:
                acc1 *= routed_weight
        out_ptrs = out + (pair.to(OFFSET)[:, None] * outputs + (pid_n * (HALVES * GROUP) + k)[None, :])
        tl.store(out_ptrs, acc0.to(out.dtype.element_ty), mask=valid[:, None])
        if HALVES == 2:
            tl.store(out_ptrs + GROUP, acc1.to(out.dtype.element_ty), mask=valid[:, None])


def fits_large_m(weight: ExpertWeights, blocks: AlignedBlocks) -> bool:
    """Return whether a GEMM should take this kernel, which adds no bias."""
    config = CONFIGS.get(blocks.block_size)
    if config is None or weight.format != "1x128" or weight.bias is not None:
        return False
    shared_bytes = capabilities(weight.values.device).shared_memory_bytes
    fits = shared_bytes is None or config.shared_bytes(blocks.block_size) <= shared_bytes
    return fits and weight.values.shape[1] % (config.halves * GROUP) == 0


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
    experts, outputs, inputs = weight.values.shape
    config, device = CONFIGS[blocks.block_size], x.values.device
    out_MO = torch.empty(pairs, outputs, dtype=dtype, device=device)
    tiles = len(blocks.expert_ids_T) * (outputs // (config.halves * GROUP))
    offset = tl.int32 if pairs * max(outputs, inputs) < 1 << 31 else tl.int64  # shorter ones take fewer registers
    _moe_gemm_fp8_kernel[min(tiles, config.programs * capabilities(device).sms),](
        x.values.contiguous(), x.scales.contiguous(),
        TensorDescriptor.from_tensor(weight.values.view(experts * outputs, inputs), [GROUP, GROUP]),
        weight.scales, out_MO, topk_weights, blocks.sorted_token_ids_P, blocks.expert_ids_T, blocks.used_blocks_1,
        pairs, outputs, inputs,
        TOP_K=top_k, MUL_ROUTED_WEIGHT=topk_weights is not None, GROUP=GROUP, BLOCK_M=blocks.block_size,
        HALVES=config.halves, GROUP_M=GROUP_M, OFFSET=offset, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out_MO
