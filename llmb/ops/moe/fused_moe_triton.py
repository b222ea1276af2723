"""Fused MoE in Triton; `fused_moe.py` defines what it computes.

Token-expert pairs are aligned to blocks. A GEMM gathers its rows by the pair indices of the block and stores its output
by pair; blocks without an expert return at once. Between the two GEMMs comes the gated activation, which also
quantizes, and after them the sum over each token's experts.

Shapes: M = N * K token-expert pairs; the others as in `fused_moe.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.activation.activation_triton import gated_activation_row
from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.device_capabilities import capabilities
from llmb.ops.moe.align_triton import (
    AlignedBlocks,
    MoEGemmConfig,
    choose_block_size,
    grouped_pids,
    moe_align_block_size,
)
from llmb.ops.moe.expert_weights import FP4_GROUPS, ExpertWeights
from llmb.ops.moe.fused_moe import Routing
from llmb.ops.moe.fused_moe_fp4_triton import fp4_gemm, widen, widens_first
from llmb.ops.moe.fused_moe_fp8_triton import fits_large_m, large_m_gemm
from llmb.ops.quant.activation_quant import GROUP, Activation, GroupFp8, QuantFormat, as_activation, empty_activation

CHANNELS = 1024  # of a token that one program sums
DEPENDENT_PAIRS = 128  # most pairs of a step whose kernels use programmatic dependent launch
MAX_TOKENS = 16384  # per pass; more would fill memory with intermediates and gain nothing


# By block size. With few rows the kernel waits for weights, and many small programs request them at once.
CONFIGS = {
    16: MoEGemmConfig(64, 128, 4, 4, 1),
    32: MoEGemmConfig(64, 128, 4, 4, 1),
    64: MoEGemmConfig(128, 64, 4, 4, 8),
    128: MoEGemmConfig(256, 64, 8, 4, 8),
}
FP8_CONFIGS = {
    16: MoEGemmConfig(64, 128, 4, 5, 1),
    32: MoEGemmConfig(64, 128, 4, 5, 1),
    64: MoEGemmConfig(128, 128, 4, 4, 8),
    128: MoEGemmConfig(128, 128, 8, 3, 8),
}


@triton.jit(do_not_specialize=["pairs", "num_blocks"])
def _moe_gemm_kernel(
    x, x_scales, weight, weight_scales, bias, out, topk_weights, sorted_token_ids, expert_ids, pairs, num_blocks,
    outputs, inputs,
    QUANT_FORMAT: tl.constexpr, TOP_K: tl.constexpr, MUL_ROUTED_WEIGHT: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // TOP_K] @ weight[expert].T + bias[expert] for a block of pairs of one expert."""
    pdl_wait(USE_PDL)
    pid_m, pid_n = grouped_pids(tl.program_id(0), num_blocks, outputs, BLOCK_N, GROUP_M)
    expert = tl.load(expert_ids + pid_m).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_token_ids + pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    valid = pair < pairs
    row = pair // TOP_K
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    output = column % outputs  # columns beyond the last are computed from others and never stored
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x + row[:, None] * inputs + k[None, :]
    weight_ptrs = weight + expert * outputs * inputs + output[None, :].to(tl.int64) * inputs + k[:, None]
    if QUANT_FORMAT == "1x128":
        groups = inputs // GROUP
        x_scale_ptrs = x_scales + row * groups
        weight_scale_ptr = weight_scales + (expert * (outputs // GROUP) + pid_n * BLOCK_N // GROUP) * groups
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        if EVEN_K:
            x_block = tl.load(x_ptrs, mask=valid[:, None], other=0.0)
            weight_block = tl.load(weight_ptrs)
        else:
            k_mask = start + k < inputs
            x_block = tl.load(x_ptrs, mask=valid[:, None] & k_mask[None, :], other=0.0)
            weight_block = tl.load(weight_ptrs, mask=k_mask[:, None], other=0.0)
        if QUANT_FORMAT == "1x128":
            scale = tl.load(x_scale_ptrs, mask=valid, other=0.0) * tl.load(weight_scale_ptr)
            acc += tl.dot(x_block, weight_block) * scale[:, None]
            x_scale_ptrs += 1
            weight_scale_ptr += 1
        else:
            acc = tl.dot(x_block, weight_block, acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if QUANT_FORMAT == "per_token":
        row_scale = tl.load(x_scales + row, mask=valid, other=0.0)
        acc *= row_scale[:, None] * tl.load(weight_scales + expert * outputs + output)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + expert * outputs + output).to(tl.float32)[None, :]
    if MUL_ROUTED_WEIGHT:
        acc *= tl.load(topk_weights + pair, mask=valid, other=0.0)[:, None]
    out_ptrs = out + pair[:, None] * outputs + column[None, :]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=valid[:, None] & (column < outputs)[None, :])


@triton.jit(do_not_specialize=["first_expert", "experts"])
def _moe_gated_act_kernel(
    gate_up, topk_ids, out, scales, first_expert, experts,
    F: tl.constexpr, BLOCK_F: tl.constexpr, ACTIVATION: tl.constexpr, QUANT_FORMAT: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up of one pair, in the format that the second GEMM takes."""
    pdl_wait(USE_PDL)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(topk_ids + pair) - first_expert
    if (expert >= 0) & (expert < experts):
        gated_activation_row(pair, gate_up, out, scales, F, BLOCK_F, ACTIVATION, QUANT_FORMAT)


@triton.jit(do_not_specialize=["first_expert", "experts"])
def _moe_sum_kernel(
    pair_outputs, topk_ids, out, first_expert, experts, width,
    TOP_K: tl.constexpr, CHANNELS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Sum a token's outputs of this rank's experts in the order of k."""
    pdl_wait(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < width
    acc = tl.zeros((CHANNELS,), tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(topk_ids + pair) - first_expert
        is_local = (expert >= 0) & (expert < experts)
        acc += tl.load(pair_outputs + pair * width + channel, mask=mask & is_local, other=0.0).to(tl.float32)
    tl.store(out + token * width + channel, acc.to(out.dtype.element_ty), mask=mask)


def fused_moe_triton(
    x: Activation,
    routing: Routing,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: str,
    dtype: torch.dtype,
) -> Tensor:
    """See `fused_moe.fused_moe`; the block size follows from the number of pairs."""
    tokens, (experts, channels, _) = len(routing.topk_ids_NK), down.values.shape
    out_NC = torch.empty(tokens, channels, dtype=dtype, device=routing.topk_ids_NK.device)
    for start in range(0, tokens, MAX_TOKENS):
        rows = slice(start, start + MAX_TOKENS)
        topk_weights_NK = routing.topk_weights_NK[rows].contiguous()
        topk_ids_NK = routing.topk_ids_NK[rows].contiguous()
        pairs, top_k = topk_ids_NK.numel(), topk_ids_NK.shape[1]
        block_size = choose_block_size(pairs, routing.experts)
        blocks = moe_align_block_size(topk_ids_NK, routing.first_expert, experts, block_size)
        widens = widens_first(gate_up, pairs, routing.experts)
        gate_up_M2F = moe_gemm(
            _slice_rows(x, rows), widen(gate_up, dtype) if widens else gate_up, blocks, pairs, top_k, dtype
        )
        hidden = moe_gated_act(gate_up_M2F, topk_ids_NK, routing.first_expert, experts, activation, down.quant_format)
        pair_outputs_MC = moe_gemm(
            hidden, widen(down, dtype) if widens else down, blocks, pairs, 1, dtype, topk_weights_NK
        )
        _moe_sum_kernel[len(topk_ids_NK), triton.cdiv(channels, CHANNELS)](
            pair_outputs_MC, topk_ids_NK, out_NC[rows], routing.first_expert, experts, channels,
            TOP_K=top_k, CHANNELS=CHANNELS, **pdl_options(len(topk_ids_NK)),
        )  # fmt: skip
    return out_NC


def _slice_rows(x: Activation, rows: slice) -> Activation:
    return x[rows] if isinstance(x, Tensor) else type(x)(x.values[rows], x.scales[rows])


def moe_gemm(
    x: Activation,
    weight: ExpertWeights,
    blocks: AlignedBlocks,
    pairs: int,
    top_k: int,
    dtype: torch.dtype,
    topk_weights: Tensor | None = None,
) -> Tensor:
    """Multiply the row of every pair by its expert's weight, [M, O]; x has one row per `top_k` pairs."""
    if weight.format in FP4_GROUPS:
        assert isinstance(x, Tensor)
        return fp4_gemm(x, weight, blocks, pairs, top_k, dtype, topk_weights)
    if isinstance(x, GroupFp8) and fits_large_m(weight, blocks):
        return large_m_gemm(x, weight, blocks, pairs, top_k, dtype, topk_weights)
    values, scales = (x.contiguous(), None) if isinstance(x, Tensor) else (x.values.contiguous(), x.scales.contiguous())
    outputs, inputs = weight.values.shape[1:]
    out_MO = torch.empty(pairs, outputs, dtype=dtype, device=values.device)
    config = (CONFIGS if weight.format == "plain" else FP8_CONFIGS)[blocks.block_size]
    shared_bytes = capabilities(values.device).shared_memory_bytes
    config = config.fitted(blocks.block_size, values.element_size(), shared_bytes)
    num_blocks = len(blocks.expert_ids_T)
    _moe_gemm_kernel[num_blocks * triton.cdiv(outputs, config.block_n),](
        values, scales, weight.values, weight.scales, weight.bias, out_MO, topk_weights, blocks.sorted_token_ids_P,
        blocks.expert_ids_T, pairs, num_blocks, outputs, inputs,
        QUANT_FORMAT=weight.format, TOP_K=top_k, MUL_ROUTED_WEIGHT=topk_weights is not None,
        EVEN_K=inputs % config.block_k == 0, HAS_BIAS=weight.bias is not None, GROUP=GROUP,
        BLOCK_M=blocks.block_size, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(pairs, DEPENDENT_PAIRS),
    )  # fmt: skip
    return out_MO


def moe_gated_act(
    gate_up_M2F: Tensor,
    topk_ids_NK: Tensor,
    first_expert: int,
    experts: int,
    activation: str,
    quant_format: QuantFormat,
) -> Activation:
    """Compute the input of the second GEMM; rows of pairs of other ranks' experts are left uninitialized."""
    pairs, width = len(gate_up_M2F), gate_up_M2F.shape[1] // 2
    out_MF, scales = empty_activation(pairs, width, quant_format, gate_up_M2F)
    block = max(triton.next_power_of_2(width), GROUP)
    _moe_gated_act_kernel[pairs,](
        gate_up_M2F, topk_ids_NK, out_MF, scales, first_expert, experts,
        F=width, BLOCK_F=block, ACTIVATION=activation, QUANT_FORMAT=quant_format,
        num_warps=min(max(block // 1024, 1), 16), **pdl_options(pairs, DEPENDENT_PAIRS),
    )  # fmt: skip
    return as_activation(out_MF, scales, quant_format)
