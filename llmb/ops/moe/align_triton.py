"""Alignment of routed tokens to blocks in Triton: the pairs of each expert are padded to whole blocks of rows.

Only the device knows how many blocks are in use. The host takes the maximum for the number of pairs, so that a CUDA
graph can be captured; unused blocks come last. Without atomics, so an expert's pairs stay in order.

Shapes: N tokens, K experts per token, M = N * K token-expert pairs, E experts of this rank, T blocks,
P = T * block_size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import pdl_options, pdl_wait

MAX_CHUNK, WARPS = 4096, 8  # pairs that a program reads at a time: every program reads all, one chunk after the other

MIN_COLUMNS = 128  # of tiles that are made smaller


class MoEGemmConfig(NamedTuple):
    """Tile sizes and launch options of an MoE GEMM; its BLOCK_M is the block size of the alignment."""

    block_n: int  # at most 128 with a scale per 128 channels
    block_k: int  # 128 with a scale per 128 channels
    num_warps: int
    num_stages: int
    group_m: int  # blocks of rows computed before the next columns, so that weights are reused from cache
    maxnreg: int | None = None  # registers of a thread: fewer let an SM run more programs at once

    def fitted(self, block_m: int, itemsize: int, shared_bytes: int | None) -> "MoEGemmConfig":
        """Return tiles whose stages fit into shared memory: of fewer columns down to 128, then fewer stages."""
        config = self
        while shared_bytes is not None and config.num_stages > 1:
            if config.num_stages * (block_m + config.block_n) * config.block_k * itemsize <= shared_bytes:
                break
            if config.block_n > MIN_COLUMNS:
                config = config._replace(block_n=config.block_n // 2)
            else:
                config = config._replace(num_stages=config.num_stages - 1)
        return config


@triton.jit(do_not_specialize=["first_expert", "pairs"])
def _moe_count_kernel(topk_ids, counts, first_expert, pairs, CHUNK: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    expert = tl.program_id(0)
    matches = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        matches += (tl.load(topk_ids + pair, mask=pair < pairs, other=-1) == first_expert + expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(matches))


@triton.jit(do_not_specialize=["first_expert", "pairs", "experts", "num_blocks"])
def _moe_align_kernel(
    topk_ids, counts, sorted_token_ids, expert_ids, used_blocks, first_expert, pairs, experts, num_blocks,
    BLOCK_SIZE: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program for each expert, and one more for the unused blocks."""
    pdl_wait(USE_PDL)
    expert = tl.program_id(0)
    all_experts = tl.arange(0, EXPERTS)
    blocks_of = tl.cdiv(tl.load(counts + all_experts, mask=all_experts < experts, other=0), BLOCK_SIZE)
    first_block = tl.sum(tl.where(all_experts < expert, blocks_of, 0))
    expert_blocks = tl.sum(tl.where(all_experts == expert, blocks_of, 0))
    end_block = tl.where(expert < experts, first_block + expert_blocks, num_blocks)
    expert_id = tl.where(expert < experts, expert, -1)
    if expert < experts:
        offset = first_block * BLOCK_SIZE
        for start in range(0, pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            matches = tl.load(topk_ids + pair, mask=pair < pairs, other=-1) == first_expert + expert
            rank = tl.cumsum(matches.to(tl.int32), 0)
            tl.store(sorted_token_ids + offset + rank - 1, pair, mask=matches)
            offset += tl.sum(matches.to(tl.int32))
        padding = offset + tl.arange(0, BLOCK_SIZE)
        padded = tl.full((BLOCK_SIZE,), pairs, tl.int32)
        tl.store(sorted_token_ids + padding, padded, mask=padding < end_block * BLOCK_SIZE)
    else:
        tl.store(used_blocks, first_block)
    for start in range(first_block, end_block, CHUNK):
        block = start + tl.arange(0, CHUNK)
        tl.store(expert_ids + block, tl.zeros((CHUNK,), tl.int32) + expert_id, mask=block < end_block)


@triton.jit
def grouped_pids(tile, num_blocks, outputs, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the block of rows and the block of columns of a tile, in grouped ordering."""
    blocks_n = tl.cdiv(outputs, BLOCK_N)
    group, within = tile // (GROUP_M * blocks_n), tile % (GROUP_M * blocks_n)
    height = min(num_blocks - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % height, within // height


class AlignedBlocks(NamedTuple):
    """Token-expert pairs sorted by expert, in whole blocks."""

    sorted_token_ids_P: Tensor  # int32, pair indices; M in padding
    expert_ids_T: Tensor  # int32, relative to this rank's first expert; -1 for an unused block
    used_blocks_1: Tensor  # int32, blocks in use
    block_size: int


def max_blocks(pairs: int, experts: int, block_size: int) -> int:
    """Return the most blocks that so many pairs fill: as many experts as possible pad their last block."""
    return (pairs + min(experts, pairs) * (block_size - 1)) // block_size


def choose_block_size(pairs: int, experts: int) -> int:
    """Return the smallest block size that holds an expert's pairs under balanced load."""
    return next((block_size for block_size in (16, 32, 64) if pairs <= block_size * experts), 128)


def moe_align_block_size(topk_ids_NK: Tensor, first_expert: int, experts: int, block_size: int) -> AlignedBlocks:
    """Sort the pairs of this rank's `experts`, from `first_expert` on, into blocks."""
    pairs = topk_ids_NK.numel()
    num_blocks = max_blocks(pairs, experts, block_size)
    counts_E, sorted_token_ids_P, expert_ids_T, used_blocks_1 = (
        torch.empty(size, dtype=torch.int32, device=topk_ids_NK.device)
        for size in (experts, num_blocks * block_size, num_blocks, 1)
    )
    launch = {"CHUNK": min(MAX_CHUNK, max(256, triton.next_power_of_2(pairs))), "num_warps": WARPS}
    launch |= pdl_options(len(topk_ids_NK))
    _moe_count_kernel[experts,](topk_ids_NK, counts_E, first_expert, pairs, **launch)
    _moe_align_kernel[experts + 1,](
        topk_ids_NK, counts_E, sorted_token_ids_P, expert_ids_T, used_blocks_1, first_expert, pairs, experts,
        num_blocks, BLOCK_SIZE=block_size, EXPERTS=triton.next_power_of_2(experts), **launch,
    )  # fmt: skip
    return AlignedBlocks(sorted_token_ids_P, expert_ids_T, used_blocks_1, block_size)
