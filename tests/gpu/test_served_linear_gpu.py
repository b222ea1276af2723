"""Served linear layers on a GPU: the GEMM of each format against the plain one of the same rounded numbers."""

import pytest
import torch
from cuda_checks import GPU, NEEDS_FP8_GEMM, relative_error
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import (
    MAX_SKINNY_TOKENS,
    BlockScaledWeight,
    block_scaled_gemm,
    block_scaled_mm,
    quantize_blocks,
)
from llmb.ops.quant.activation_quant import GroupFp8, quantize_activation
from llmb.serve.layers.served_linear import Format, build_linear

pytestmark = NEEDS_FP8_GEMM

DEEPSEEK = [(7168, 2112), (1536, 24576), (16384, 7168), (7168, 36864), (18432, 7168)]  # inputs, outputs
FORMATS: list[Format] = ["plain", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return (
        torch.randn(shape, device=GPU, generator=generator)
        * torch.randn(shape[:1], device=GPU, generator=generator)[:, None].exp()
    )


def operands(tokens: int, inputs: int, outputs: int) -> tuple[GroupFp8, BlockScaledWeight]:
    x = quantize_activation(randn(tokens, inputs).bfloat16(), "1x128")
    assert isinstance(x, GroupFp8)
    return x, quantize_blocks(randn(outputs, inputs, seed=1))


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 128, 1000])
@pytest.mark.parametrize(("inputs", "outputs"), DEEPSEEK, ids=str)
def test_block_scaled_gemms_of_deepseek(tokens: int, inputs: int, outputs: int) -> None:
    x, weight = operands(tokens, inputs, outputs)
    actual = block_scaled_gemm(x, weight, outputs, torch.bfloat16)
    expected = block_scaled_mm.reference(x, weight, outputs, torch.float32)
    assert actual.shape == (tokens, outputs)
    assert actual.is_contiguous()
    # bf16 rounds by 2**-9 at most; fp8 tensor cores accumulate each 128 with fewer bits than fp32.
    assert relative_error(actual, expected) < 0.004


@pytest.mark.parametrize("tokens", [1, MAX_SKINNY_TOKENS, MAX_SKINNY_TOKENS + 4])
def test_block_scaled_gemm_in_a_graph_has_the_same_bits(tokens: int) -> None:
    x, weight = operands(tokens, 2048, 7168)
    eager = block_scaled_gemm(x, weight, 7168, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed = block_scaled_gemm(x, weight, 7168, torch.bfloat16)
    graph.replay()
    assert torch.equal(graphed, eager)


@pytest.mark.parametrize("tokens", [1, 33, 512])
@pytest.mark.parametrize(("format", "input_scale"), [*((name, None) for name in FORMATS), ("fp8_tensor", 0.05)])
def test_layer_on_gpu_matches_cpu(format: Format, input_scale: float | None, tokens: int) -> None:
    x, weight = randn(tokens, 1024).bfloat16(), randn(768, 1024, seed=1)
    scale = None if input_scale is None else torch.tensor(input_scale)
    on_gpu, on_cpu = (
        build_linear(w, format=format, dtype=torch.bfloat16, input_scale=scale) for w in (weight, weight.cpu())
    )
    assert on_gpu.bytes == on_cpu.bytes
    actual, expected = (
        layer(quantize_activation(each, layer.input_format)) for layer, each in ((on_gpu, x), (on_cpu, x.cpu()))
    )
    # fp8 GEMMs use fast accumulation.
    assert relative_error(actual, expected) < (0.02 if format in ("fp8_tensor", "fp8_channel") else 0.005)
