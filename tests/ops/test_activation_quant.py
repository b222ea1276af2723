"""Quantized activations in serving: their error, and the residual that the fused norm updates."""

import pytest
import torch

from llmb.ops.norm.add_rms_norm import add_rms_norm
from llmb.ops.quant.activation_quant import dequantize, quantize_activation

pytest.importorskip("triton")


@pytest.mark.parametrize("quant_format", ["plain", "per_token", "1x128"])
def test_add_rms_norm_updates_the_residual_in_place(quant_format, device):
    generator = torch.Generator().manual_seed(7)
    x, residual, weight = (
        torch.randn(*shape, generator=generator).to(device) for shape in ((3, 384), (3, 384), (384,))
    )
    expected = x + residual
    _, total = add_rms_norm.triton(x, residual, weight, 1e-5, quant_format)
    assert total is residual
    assert torch.equal(total, expected)


@pytest.mark.parametrize("quant_format", ["per_token", "1x128"])
def test_dequantized_values_are_within_half_a_step(quant_format, device):
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(2)).to(device)[:, :384]
    for implementation in (quantize_activation.reference, quantize_activation.triton):
        error = (dequantize(implementation(x, quant_format), torch.float32) - x).abs()
        assert (error <= x.abs() * 2**-4 + x.abs().max() / 448 * 2**-10).all()
