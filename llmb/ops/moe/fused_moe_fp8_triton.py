"""MoE GEMM for many rows per expert, FP8 with a scale per 128 channels, as a persistent kernel.

Tiles are short, 6 to 16 steps of 128 channels in small experts, so a program that computes one tile would spend a
third of its time filling and draining its pipeline. Here a program per multiprocessor computes many: the loads of its
next tile are under way while it stores the last one. Weights come by tensor descriptors, which take one thread instead
of all, and rows by pointers, as they are gathered.

A tile has 256 columns as two halves. Each 128 channels are accumulated by the tensor cores and then added to the total
with their scales; two halves in turn need the registers of only one unscaled accumulator, and the rows are read once
for both. So a tile is wide enough for the L2 cache to keep up, which narrower ones outrun.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from llmb.ops.activation.activation_triton import activation_value, gate_factor
from llmb.ops.device_capabilities import capabilities
from llmb.ops.moe.align_triton import AlignedBlocks, grouped_pids
from llmb.ops.moe.expert_weights import ExpertWeights
from llmb.ops.quant.activation_quant import E4M3, GROUP, GroupFp8
from llmb.ops.quant.activation_quant_triton import quantize_groups


class PersistentConfig(NamedTuple):
    """Tile sizes and launch options by block size."""

    halves: int  # of 128 columns
    num_warps: int
    num_stages: int
    programs: int  # of a multiprocessor at a time
    group_m: int = 8  # blocks of rows computed before the next columns, so that weights are reused from cache

    def shared_bytes(self, block_m: int) -> int:
        """Return the stages of the pipeline, and a half of the tile on its way to memory in bf16."""
        return self.num_stages * (block_m + self.halves * GROUP) * GROUP + 2 * block_m * GROUP


CONFIGS = {64: PersistentConfig(2, 8, 4, 1), 128: PersistentConfig(2, 8, 3, 1)}
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["pairs"])
def _moe_gemm_fp8_kernel(
    x, x_scales, weight, weight_scales, out, out_scales, topk_weights, sorted_token_ids, expert_ids, used_blocks, pairs,
    outputs, inputs,
    TOP_K: tl.constexpr, MUL_ROUTED_WEIGHT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    HALVES: tl.constexpr, GROUP_M: tl.constexpr, TILED: tl.constexpr, PREFETCH: tl.constexpr,
    POINTERS: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // TOP_K] @ weight[expert].T for blocks of pairs, each of one expert.

    With an activation the halves of a tile are columns of gate and up, and out is their product in the format 1x128.
    """
    num_blocks = tl.load(used_blocks)
    tiles = num_blocks * (outputs // (HALVES * GROUP))
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, GROUP)
    groups = inputs // GROUP
    half = GROUP if ACTIVATION is None else outputs // 2  # from the columns of the first half to those of the second
    if PREFETCH:
        pid_m, _ = grouped_pids(tl.program_id(0), num_blocks, outputs, HALVES * GROUP, GROUP_M)
        next_expert = tl.load(expert_ids + pid_m)
        next_pair = tl.load(sorted_token_ids + pid_m * BLOCK_M + m)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_pids(tile, num_blocks, outputs, HALVES * GROUP, GROUP_M)
        if PREFETCH:
            expert, pair = next_expert, next_pair
            following = tl.minimum(tile + tl.num_programs(0), tiles - 1)
            next_m, _ = grouped_pids(following, num_blocks, outputs, HALVES * GROUP, GROUP_M)
            next_expert = tl.load(expert_ids + next_m)
            next_pair = tl.load(sorted_token_ids + next_m * BLOCK_M + m)
        else:
            expert = tl.load(expert_ids + pid_m)
            pair = tl.load(sorted_token_ids + pid_m * BLOCK_M + m)
        valid = pair < pairs
        row = tl.where(valid, pair, 0) // TOP_K  # scales of padding are some row's, its values zeros
        output = expert * outputs + pid_n * (HALVES * GROUP if ACTIVATION is None else GROUP)
        x_ptrs = x + (row[:, None] * inputs + k[None, :])
        weight_scale_ptr = weight_scales + output // GROUP * groups
        if POINTERS:
            weight_ptrs = weight + output.to(tl.int64) * inputs + (k[:, None] * inputs + k[None, :])
        acc0 = tl.zeros((BLOCK_M, GROUP), tl.float32)
        if HALVES == 2:
            acc1 = tl.zeros((BLOCK_M, GROUP), tl.float32)
        for group in range(groups):
            x_block = tl.load(x_ptrs + group * GROUP, mask=valid[:, None], other=0.0)
            scale = tl.load(x_scales + row * groups + group)
            if POINTERS:
                weight0 = tl.load(weight_ptrs + group * GROUP)
            elif TILED:
                weight0 = weight.load([output * groups + group * GROUP, 0])
            else:
                weight0 = weight.load([output, group * GROUP])
            acc0 += tl.dot(x_block, weight0.T) * (scale * tl.load(weight_scale_ptr + group))[:, None]
            if HALVES == 2:
                if POINTERS:
                    weight1 = tl.load(weight_ptrs + half * inputs + group * GROUP)
                elif TILED:
                    weight1 = weight.load([(output + half) * groups + group * GROUP, 0])
                else:
                    weight1 = weight.load([output + half, group * GROUP])
                acc1 += (
                    tl.dot(x_block, weight1.T)
                    * (scale * tl.load(weight_scale_ptr + half // GROUP * groups + group))[:, None]
                )
        if MUL_ROUTED_WEIGHT:
            routed_weight = tl.load(topk_weights + pair, mask=valid, other=0.0)[:, None]
            acc0 *= routed_weight
            if HALVES == 2:
                acc1 *= routed_weight
        if ACTIVATION is not None:
            # Rounded like gate, up and their product when each is stored.
            gate, up = acc0.to(DTYPE).to(tl.float32), acc1.to(DTYPE).to(tl.float32)
            act = activation_value(gate, ACTIVATION)
            if ACTIVATION != "swigluoai":
                act = act.to(DTYPE).to(tl.float32)
            act = (act * gate_factor(up, ACTIVATION)).to(DTYPE).to(tl.float32)
            values, act_scale = quantize_groups(act)
            tl.store(out + (pair[:, None] * half + (pid_n * GROUP + k)[None, :]), values, mask=valid[:, None])
            tl.store(out_scales + pair * (half // GROUP) + pid_n, act_scale, mask=valid)
        else:
            out_ptrs = out + (pair[:, None] * outputs + (pid_n * (HALVES * GROUP) + k)[None, :])
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


def fuses_activation(gate_up: ExpertWeights, down: ExpertWeights, blocks: AlignedBlocks) -> bool:
    """Return whether the first GEMM may apply the activation: its tiles then have columns of gate and up."""
    return fits_large_m(gate_up, blocks) and CONFIGS[blocks.block_size].halves == 2 and down.quant_format == "1x128"


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
    out_MO = torch.empty(pairs, weight.values.shape[1], dtype=dtype, device=x.values.device)
    _launch(x, weight, blocks, pairs, top_k, out_MO, None, topk_weights, None, dtype)
    return out_MO


def gated_gemm(
    x: GroupFp8,
    gate_up: ExpertWeights,
    blocks: AlignedBlocks,
    pairs: int,
    top_k: int,
    dtype: torch.dtype,
    activation: str,
) -> GroupFp8:
    """Compute activation(gate) * up of every pair, rounded to `dtype` where the activation by itself would be."""
    width, device = gate_up.values.shape[1] // 2, x.values.device
    hidden = GroupFp8(
        torch.empty(pairs, width, dtype=E4M3, device=device), torch.empty(pairs, width // GROUP, device=device)
    )
    _launch(x, gate_up, blocks, pairs, top_k, *hidden, None, activation, dtype)
    return hidden


def _launch(
    x: GroupFp8,
    weight: ExpertWeights,
    blocks: AlignedBlocks,
    pairs: int,
    top_k: int,
    out: Tensor,
    out_scales: Tensor | None,
    topk_weights: Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
) -> None:
    experts, outputs, inputs = weight.values.shape
    assert pairs * max(outputs, inputs) < 1 << 31, "offsets of 32 bits"
    config = CONFIGS[blocks.block_size]
    tiles = len(blocks.expert_ids_T) * (outputs // (config.halves * GROUP))
    _moe_gemm_fp8_kernel[min(tiles, config.programs * capabilities(x.values.device).sms),](
        x.values.contiguous(), x.scales.contiguous(),
        TensorDescriptor.from_tensor(weight.values.view(experts * outputs, inputs), [GROUP, GROUP]),
        weight.scales, out, out_scales, topk_weights, blocks.sorted_token_ids_P, blocks.expert_ids_T,
        blocks.used_blocks_1, pairs, outputs, inputs,
        TOP_K=top_k, MUL_ROUTED_WEIGHT=topk_weights is not None, GROUP=GROUP, BLOCK_M=blocks.block_size,
        HALVES=config.halves, GROUP_M=config.group_m, TILED=False, PREFETCH=False, POINTERS=False,
        ACTIVATION=activation, DTYPE=TRITON_DTYPES[dtype],
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
