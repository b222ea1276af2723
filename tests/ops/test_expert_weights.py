"""Expert weights, quantized matrix by matrix: dequantization is as exact as the format allows."""

from collections.abc import Callable

import pytest
import torch

from llmb.ops.moe.expert_weights import ExpertFormat, dequantize_expert, empty_expert_weights, fill_expert_rows
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from llmb.ops.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4

CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.mark.parametrize("expert_format", ["per_token", "1x128"])
def test_fp8_has_three_bits_of_mantissa(expert_format: ExpertFormat) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    weight[:128] *= 1e-3
    weights = empty_expert_weights((2, 512, 384), expert_format, FP32, CPU)
    fill_expert_rows(weights, 1, 256, weight)
    error = (dequantize_expert(weights, 1)[256:] - weight).abs()
    upper, lower = weight[:128].abs().max(), weight[128:].abs().max()
    largest = (
        weight.abs().amax(1, keepdim=True)
        if expert_format == "per_token"
        else torch.stack((upper, lower)).repeat_interleave(128)
    )
    assert (error <= weight.abs() * 2.0**-4 + largest.view(-1, 1) * 2.0**-9 / 448).all()
    assert error.max() > 0


def test_per_tensor_scale() -> None:
    weights = empty_expert_weights((2, 6, 8), "per_token", FP32, CPU)
    for expert in range(2):
        fill_expert_rows(
            weights, expert, 0, torch.randn(6, 8, generator=torch.Generator().manual_seed(expert)), per_tensor=True
        )
    assert weights.scales is not None
    assert (weights.scales == weights.scales[:, :1]).all()
    assert weights.scales[0, 0] != weights.scales[1, 0]
    assert (weights.values.float().abs().amax(dim=(1, 2)) == torch.finfo(E4M3).max).all()


def nvfp4(*matrices: torch.Tensor) -> torch.Tensor:
    """Every matrix has a scale of its own."""
    return torch.cat([dequantize_nvfp4(quantize_nvfp4(matrix)) for matrix in matrices])


def mxfp4(*matrices: torch.Tensor) -> torch.Tensor:
    """Matrices are packed side by side."""
    return dequantize_mxfp4(quantize_mxfp4(torch.cat(matrices)))


@pytest.mark.parametrize("dequantized", [nvfp4, mxfp4])
def test_fp4_matrices_of_an_expert(dequantized: Callable[..., torch.Tensor]) -> None:
    gate, up = (size * torch.randn(24, 64, generator=torch.Generator().manual_seed(2)) for size in (1.0, 30.0))
    weights = empty_expert_weights((3, 48, 64), dequantized.__name__, FP32, CPU)  # type: ignore[arg-type]
    fill_expert_rows(weights, 2, 0, gate)
    fill_expert_rows(weights, 2, 24, up)
    assert (weights.inputs, weights.quant_format) == (64, "plain")
    assert torch.equal(dequantize_expert(weights, 2), dequantized(gate, up))


def test_unquantized_weights_are_exact() -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).bfloat16()
    weights = empty_expert_weights((1, 4, 6), "plain", torch.bfloat16, CPU)
    fill_expert_rows(weights, 0, 0, weight)
    assert torch.equal(dequantize_expert(weights, 0), weight.float())
