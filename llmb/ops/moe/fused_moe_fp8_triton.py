"""MoE GEMM for many rows per expert, FP8 with a scale per 128 channels, as a persistent kernel.

Tiles are short, 6 to 16 steps of 128 channels in small experts. Here a program per multiprocessor computes many: the
loads of its next tile are under way while it stores the last one. Weights come by tensor descriptors, which take one
thread instead of all, and rows by pointers, as they are gathered.

A tile has 256 columns, two blocks of 128 with a scale each, so that the L2 cache is asked less often for the rows.
Each 128 channels are accumulated by the tensor cores and then added to the total with their scales. With 64 rows that
is one product a step. With 128 rows registers hold only one unscaled block beside the total: two products in turn.

The two blocks may be columns of gate and up: then the tile is stored as activation(gate) * up, quantized.
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

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class PersistentConfig(NamedTuple):
    """Tile and launch options of a block size."""

    blocks_n: int  # of 128 columns
    in_turn: bool  # whether two blocks of columns are multiplied in turn
    num_warps: int
    num_stages: int
    programs: int = 1  # of a multiprocessor at a time
    group_m: int = 8  # blocks of rows computed before the next columns, so that weights are reused from cache

    def shared_bytes(self, block_m: int) -> int:
        """Return the stages of the pipeline, and what of a tile is on its way to memory at a time, in bf16."""
        stored = 2 * block_m * GROUP * (1 if self.in_turn else self.blocks_n)
        return self.num_stages * (block_m + self.blocks_n * GROUP) * GROUP + stored


CONFIGS = {64: PersistentConfig(2, False, 8, 4), 128: PersistentConfig(2, True, 8, 3)}
# With the activation: with many rows the pass that it saves takes less time than it adds to the tiles.
GATED_CONFIGS = {64: PersistentConfig(2, False, 8, 4)}


@triton.jit(do_not_specialize=["pairs"])
def _moe_gemm_fp8_kernel(
    x, x_scales, weight, weight_scales, out, out_scales, topk_weights, sorted_token_ids, expert_ids, used_blocks, pairs,
    outputs, inputs,
    TOP_K: tl.constexpr, MUL_ROUTED_WEIGHT: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCKS_N: tl.constexpr,
    IN_TURN: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // TOP_K] @ weight[expert].T for blocks of pairs, each of one expert."""
    num_blocks = tl.load(used_blocks)
    tiles = num_blocks * (outputs // (BLOCKS_N * GROUP))
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, GROUP)
    groups = inputs // GROUP
    width = GROUP if ACTIVATION is None else outputs // 2  # from the first block of columns to the second
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_pids(tile, num_blocks, outputs, BLOCKS_N * GROUP, GROUP_M)
        expert = tl.load(expert_ids + pid_m)
        pair = tl.load(sorted_token_ids + pid_m * BLOCK_M + m)
        valid = pair < pairs
        row = tl.where(valid, pair, 0) // TOP_K  # scales of padding are some row's, its values zeros
        # The weight is [matrices, width, inputs]: experts' blocks of 128 outputs, or their gates and ups.
        matrix, output = (expert * outputs + pid_n * BLOCKS_N * GROUP) // GROUP, 0
        if ACTIVATION is not None:
            matrix, output = expert * 2, pid_n * GROUP
        x_ptrs = x + (row[:, None] * inputs + k[None, :])
        weight_scale_ptr = weight_scales + (matrix * width + output) // GROUP * groups
        if IN_TURN:
            acc0 = tl.zeros((BLOCK_M, GROUP), tl.float32)
            acc1 = tl.zeros((BLOCK_M, GROUP), tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCKS_N, GROUP), tl.float32)
        for group in range(groups):
            x_block = tl.load(x_ptrs + group * GROUP, mask=valid[:, None], other=0.0)
            scale = tl.load(x_scales + row * groups + group)
            if IN_TURN:
                weight0 = weight.load([matrix, output, group * GROUP]).reshape(GROUP, GROUP)
                acc0 += tl.dot(x_block, weight0.T) * (scale * tl.load(weight_scale_ptr + group))[:, None]
                weight1 = weight.load([matrix + 1, output, group * GROUP]).reshape(GROUP, GROUP)
                weight_scale1 = tl.load(weight_scale_ptr + width // GROUP * groups + group)
                acc1 += tl.dot(x_block, weight1.T) * (scale * weight_scale1)[:, None]
            else:
                both = weight.load([matrix, output, group * GROUP]).reshape(BLOCKS_N * GROUP, GROUP)
                weight_scale = tl.load(weight_scale_ptr + tl.arange(0, BLOCKS_N) * (width // GROUP * groups) + group)
                factor = scale[:, None] * weight_scale[None, :]
                acc += tl.dot(x_block, both.T).reshape(BLOCK_M, BLOCKS_N, GROUP) * factor[:, :, None]
        if MUL_ROUTED_WEIGHT:
            routed_weight = tl.load(topk_weights + pair, mask=valid, other=0.0)[:, None]
            if IN_TURN:
                acc0 *= routed_weight
                acc1 *= routed_weight
            else:
                acc *= routed_weight[:, :, None]
        if ACTIVATION is None:
            out_ptrs = out + (pair[:, None] * outputs + pid_n * BLOCKS_N * GROUP)
            if IN_TURN:
                tl.store(out_ptrs + k[None, :], acc0.to(out.dtype.element_ty), mask=valid[:, None])
                tl.store(out_ptrs + GROUP + k[None, :], acc1.to(out.dtype.element_ty), mask=valid[:, None])
            else:
                tile_out = acc.to(out.dtype.element_ty).reshape(BLOCK_M, BLOCKS_N * GROUP)
                tl.store(out_ptrs + tl.arange(0, BLOCKS_N * GROUP)[None, :], tile_out, mask=valid[:, None])
        else:  # rounded to DTYPE like gate, up and their product where the activation is a kernel of its own
            if IN_TURN:
                gate, up = acc0.to(DTYPE), acc1.to(DTYPE)
            else:
                gate, up = acc.to(DTYPE).permute(0, 2, 1).split()
            act = activation_value(gate.to(tl.float32), ACTIVATION)
            if ACTIVATION != "swigluoai":
                act = act.to(DTYPE).to(tl.float32)
            act *= gate_factor(up.to(tl.float32), ACTIVATION)
            values, act_scale = quantize_groups(act.to(DTYPE).to(tl.float32))
            tl.store(out + (pair[:, None] * width + (output + k)[None, :]), values, mask=valid[:, None])
            tl.store(out_scales + pair * (width // GROUP) + pid_n, act_scale, mask=valid)


def fits_large_m(weight: ExpertWeights, blocks: AlignedBlocks) -> bool:
    """Return whether a GEMM should take this kernel, which adds no bias."""
    return _fits(weight, blocks, CONFIGS.get(blocks.block_size))


def fuses_activation(gate_up: ExpertWeights, down: ExpertWeights, blocks: AlignedBlocks) -> bool:
    """Return whether the first GEMM applies the activation."""
    return down.quant_format == "1x128" and _fits(gate_up, blocks, GATED_CONFIGS.get(blocks.block_size))


def _fits(weight: ExpertWeights, blocks: AlignedBlocks, config: PersistentConfig | None) -> bool:
    if config is None or weight.format != "1x128" or weight.bias is not None:
        return False
    shared_bytes = capabilities(weight.values.device).shared_memory_bytes
    fits = shared_bytes is None or config.shared_bytes(blocks.block_size) <= shared_bytes
    return fits and weight.values.shape[1] % (config.blocks_n * GROUP) == 0


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
    """Compute activation(gate) * up of every pair, rounded to `dtype` as by `moe_gated_act`."""
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
    outputs, inputs = weight.values.shape[1:]
    assert pairs * max(outputs, inputs) < 1 << 31, "offsets have 32 bits"
    config = (CONFIGS if activation is None else GATED_CONFIGS)[blocks.block_size]
    matrices = weight.values.view(-1, GROUP if activation is None else outputs // 2, inputs)
    box = [1 if config.in_turn else config.blocks_n, GROUP, GROUP]
    tiles = len(blocks.expert_ids_T) * (outputs // (config.blocks_n * GROUP))
    _moe_gemm_fp8_kernel[min(tiles, config.programs * capabilities(x.values.device).sms),](
        x.values.contiguous(), x.scales.contiguous(), TensorDescriptor.from_tensor(matrices, box), weight.scales,
        out, out_scales, topk_weights, blocks.sorted_token_ids_P, blocks.expert_ids_T, blocks.used_blocks_1, pairs,
        outputs, inputs,
        TOP_K=top_k, MUL_ROUTED_WEIGHT=topk_weights is not None, ACTIVATION=activation, DTYPE=TRITON_DTYPES[dtype],
        GROUP=GROUP, BLOCK_M=blocks.block_size, GROUP_M=config.group_m, BLOCKS_N=config.blocks_n,
        IN_TURN=config.in_turn, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
