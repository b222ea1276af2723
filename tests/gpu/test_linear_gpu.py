"""Served linear layers on a real GPU: each format's product against the plain one of the same rounded numbers."""

import pytest
import torch
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import (
    MAX_SKINNY_TOKENS,
    BlockScaledWeight,
    block_scaled_gemm,
    block_scaled_mm,
    cublas_block_scaled_gemm,
    cublas_supports_block_scaling,
    quantize_blocks,
)
from llmb.ops.quant.activation_quant import GroupFp8, quantize_activation
from llmb.serve.layers.served_linear import Format, build_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no GPU with 8-bit products",
    ),
]

GPU = torch.device("cuda", 0)
DEEPSEEK = [(7168, 2112), (1536, 24576), (16384, 7168), (7168, 36864), (18432, 7168)]  # inputs, outputs
FORMATS: list[Format] = ["plain", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return (
        torch.randn(shape, device=GPU, generator=generator)
        * torch.randn(shape[:1], device=GPU, generator=generator)[:, None].exp()
    )


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def operands(tokens: int, inputs: int, outputs: int) -> tuple[GroupFp8, BlockScaledWeight]:
    x = quantize_activation(drawn(tokens, inputs).bfloat16(), "1x128")
    assert isinstance(x, GroupFp8)
    return x, quantize_blocks(drawn(outputs, inputs, seed=1))


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 128, 1000])
@pytest.mark.parametrize(("inputs", "outputs"), DEEPSEEK, ids=str)
def test_block_products_of_deepseek(tokens: int, inputs: int, outputs: int) -> None:
    x, weight = operands(tokens, inputs, outputs)
    found = block_scaled_gemm(x, weight, outputs, torch.bfloat16)
    wanted = block_scaled_mm.reference(x, weight, outputs, torch.float32)
    assert found.shape == (tokens, outputs)
    assert found.is_contiguous()
    # bf16 rounds by 2**-9 at most; the hardware adds each 128 with some bits fewer than fp32.
    assert relative_error(found, wanted) < 0.004


@pytest.mark.parametrize("tokens", [66, 129, 4096])
def test_both_ways_agree(tokens: int) -> None:
    if not cublas_supports_block_scaling(GPU):
        pytest.skip("cuBLAS has no block scales on this GPU")
    x, weight = operands(tokens, 1024, 576)
    ours, theirs = (way(x, weight, 576, torch.bfloat16) for way in (block_scaled_mm.triton, cublas_block_scaled_gemm))
    assert relative_error(ours, theirs) < 0.004


@pytest.mark.parametrize("tokens", [1, MAX_SKINNY_TOKENS, MAX_SKINNY_TOKENS + 4])
def test_a_block_product_in_a_graph_is_the_same_bits(tokens: int) -> None:
    x, weight = operands(tokens, 2048, 7168)
    eager = block_scaled_gemm(x, weight, 7168, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = block_scaled_gemm(x, weight, 7168, torch.bfloat16)
    graph.replay()
    assert torch.equal(held, eager)


@pytest.mark.parametrize("tokens", [1, 33, 512])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_gives_on_the_gpu_what_it_gives_on_the_cpu(format: Format, tokens: int) -> None:
    x, weight = drawn(tokens, 1024).bfloat16(), drawn(768, 1024, seed=1)
    there, here = (
        build_linear(weight, format=format, dtype=torch.bfloat16),
        build_linear(weight.cpu(), format=format, dtype=torch.bfloat16),
    )
    assert there.bytes == here.bytes
    found, wanted = (
        there(quantize_activation(x, there.input_format)),
        here(quantize_activation(x.cpu(), here.input_format)),
    )
    # 8-bit products add with fewer bits: `use_fast_accum`.
    assert relative_error(found.cpu(), wanted) < (0.02 if format in ("fp8_tensor", "fp8_channel") else 0.005)


def test_a_known_scale_of_the_input() -> None:
    x, weight = drawn(16, 256).bfloat16(), drawn(64, 256, seed=1)
    scale = torch.tensor(0.05)
    there, here = (
        build_linear(w, format="fp8_tensor", dtype=torch.bfloat16, input_scale=scale) for w in (weight, weight.cpu())
    )
    assert relative_error(there(x).cpu(), here(x.cpu())) < 0.02
