"""Block-scaled fp8 weights: their quantization, and how the GEMM is split; its kernel: op_cases/gemm.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import dequantize_blocks, quantize_blocks
from llmb.ops.gemm.block_scaled_gemm_triton import num_k_splits
from llmb.ops.quant.activation_quant import E4M3_MAX

OUTPUTS = st.integers(1, 300)
GROUPS = st.integers(1, 6)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers whose magnitude differs from block to block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for dim in (-2, -1):
        sizes = torch.randn(-(-shape[dim] // 128), generator=generator).exp().repeat_interleave(128)[: shape[dim]]
        x = x * (sizes[:, None] if dim == -2 else sizes)
    return x


def quantize_dequantize(weight_OK: Tensor) -> Tensor:
    """Round a weight block by block in plain steps."""
    result = torch.empty_like(weight_OK)
    for top in range(0, weight_OK.shape[0], 128):
        for left in range(0, weight_OK.shape[1], 128):
            block = (slice(top, top + 128), slice(left, left + 128))
            scale = weight_OK[block].abs().max() * (1 / E4M3_MAX)
            result[block] = (weight_OK[block] * scale.reciprocal()).to(torch.float8_e4m3fn).float() * scale
    return result


@given(OUTPUTS, GROUPS, st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_each_block_has_its_own_scale(outputs: int, groups: int, seed: int) -> None:
    weight = randn(outputs, 128 * groups, seed=seed)
    quantized = quantize_blocks(weight)
    assert quantized.values.shape == (-(-outputs // 128) * 128, 128 * groups)
    assert quantized.scales.shape == (-(-outputs // 128), -(-groups // 4) * 4)
    assert torch.equal(dequantize_blocks(quantized, outputs), quantize_dequantize(weight))


@given(OUTPUTS, GROUPS, st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_quantization_is_idempotent(outputs: int, groups: int, seed: int) -> None:
    once = quantize_blocks(randn(outputs, 128 * groups, seed=seed))
    twice = quantize_blocks(dequantize_blocks(once, outputs))
    assert torch.equal(once.values.view(torch.uint8), twice.values.view(torch.uint8))
    assert torch.allclose(once.scales, twice.scales, rtol=1e-6)


def test_stacked_weights_are_quantized_independently() -> None:
    weight = randn(3, 200, 256)
    stack = quantize_blocks(weight)
    for index, matrix in enumerate(weight):
        single = quantize_blocks(matrix)
        assert torch.equal(stack.values[index].float(), single.values.float())
        assert torch.equal(stack.scales[index], single.scales)
    assert torch.equal(dequantize_blocks(stack, 200)[1], dequantize_blocks(quantize_blocks(weight[1]), 200))


@given(st.integers(1, 500), st.integers(1, 150), st.integers(1, 2000))
def test_split_k_is_bounded(tokens: int, groups: int, tiles: int) -> None:
    splits = num_k_splits(tokens, groups, tiles)
    assert 1 <= splits <= max(1, groups // 2)
    assert splits == 1 or splits * tokens * 8 <= groups * 128 / 4, (
        "fp32 partial results move a quarter of the weight at most"
    )
    assert splits == 1 or splits * tiles <= 512
