"""Triton kernel of the split-K GEMM: a program multiplies a tile of outputs with one split of the inputs.

Rows of the weight are the rows of the tensor cores' product and tokens its columns: 8 tokens are then no waste. Of the
splits of a tile the last to finish adds all, so that no second kernel has to.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.device_capabilities import TUNED_SMS, scaled_to_sms
from llmb.ops.gemm.split_k_gemm import BLOCK_O, SplitKWeight
from llmb.ops.quant.activation_quant import PerTokenFp8

MIN_TOKENS = 16  # columns that a product of tensor cores has at least in Triton


class SplitKConfig(NamedTuple):
    """Tile sizes and launch options."""

    block_o: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int  # of a multiprocessor, at most: splits are as many as these allow


# By tokens, rounded up to a power of two: those with the least sum over the layers of Llama 8b on an H200.
CONFIGS = {
    16: SplitKConfig(128, 128, 4, 5, 2),
    32: SplitKConfig(64, 256, 4, 4, 2),
    64: SplitKConfig(64, 256, 4, 4, 2),
    128: SplitKConfig(128, 128, 8, 5, 1),
}


@triton.jit
def _sum_splits(partial_ptr, offset, mask, stride, SPLITS: tl.constexpr):
    """Add all splits in order. Other multiprocessors wrote them, so L1 is bypassed."""
    total = tl.load(partial_ptr + offset, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + split * stride + offset, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["tokens"])
def _split_k_gemm(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, out_ptr, partial_ptr, arrivals_ptr, tokens,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    o, n, k = tile * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    steps: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    steps_per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, steps)
    weight_ptrs = weight_ptr + (o % OUTPUTS).to(tl.int64)[:, None] * INPUTS + k[None, :]
    x_ptrs = x_ptr + n[None, :] * INPUTS + k[:, None]
    is_token = n < tokens
    scales = tl.load(scales_ptr + o % OUTPUTS)
    pdl_wait(USE_PDL)
    acc = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if INPUTS % BLOCK_K == 0:
            weight = tl.load(weight_ptrs + step * BLOCK_K)
            x = tl.load(x_ptrs + step * BLOCK_K, mask=is_token[None, :], other=0.0)
        else:
            is_input = step * BLOCK_K + k < INPUTS
            weight = tl.load(weight_ptrs + step * BLOCK_K, mask=is_input[None, :], other=0.0)
            x = tl.load(x_ptrs + step * BLOCK_K, mask=is_token[None, :] & is_input[:, None], other=0.0)
        acc = tl.dot(weight, x, acc)
    offset = n[:, None] * OUTPUTS + o[None, :]
    mask = is_token[:, None] & (o < OUTPUTS)[None, :]
    sums = tl.trans(acc)
    if SPLITS > 1:
        stride = tokens * OUTPUTS
        tl.store(partial_ptr + split * stride + offset, sums, mask=mask)
        tl.debug_barrier()  # the whole program has written before it is counted
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrivals_ptr + tile, 0)
        sums = _sum_splits(partial_ptr, offset, mask, stride, SPLITS)
    x_scales = tl.load(x_scales_ptr + n, mask=is_token, other=0.0)
    sums = sums * x_scales[:, None] * scales[None, :]
    tl.store(out_ptr + offset, sums.to(out_ptr.dtype.element_ty), mask=mask)


def num_splits(config: SplitKConfig, outputs: int, inputs: int, device: torch.device) -> int:
    """Return how many programs share the inputs of a tile: as many as fill the GPU, each with a few steps."""
    programs = scaled_to_sms(TUNED_SMS * config.programs, device)
    steps = triton.cdiv(inputs, config.block_k)
    most_splits = max(1, programs // triton.cdiv(outputs, config.block_o))
    per_split = triton.cdiv(steps, min(most_splits, max(1, steps // 2)))
    return triton.cdiv(steps, per_split)  # none is left without inputs


def split_k_gemm_triton(
    x: PerTokenFp8, weight: SplitKWeight, dtype: torch.dtype, config: SplitKConfig | None = None
) -> Tensor:
    """Compute `split_k_gemm`."""
    (tokens, inputs), outputs, device = x.values.shape, len(weight.values_OK), x.values.device
    block_n = max(MIN_TOKENS, triton.next_power_of_2(tokens))
    config = config or CONFIGS[block_n]
    assert config.block_o >= BLOCK_O, "each tile of outputs has a counter"
    splits = num_splits(config, outputs, inputs, device)
    out_NO = torch.empty(tokens, outputs, dtype=dtype, device=device)
    partial = torch.empty(splits, tokens, outputs, device=device) if splits > 1 else out_NO
    _split_k_gemm[(triton.cdiv(outputs, config.block_o), splits)](
        x.values.contiguous(), x.scales.contiguous(), weight.values_OK, weight.scales_O, out_NO, partial,
        weight.arrivals_T, tokens, OUTPUTS=outputs, INPUTS=inputs, BLOCK_N=block_n, BLOCK_O=config.block_o,
        BLOCK_K=config.block_k, SPLITS=splits, STAGES=config.num_stages, num_warps=config.num_warps,
        **pdl_options(tokens),
    )  # fmt: skip
    return out_NO
