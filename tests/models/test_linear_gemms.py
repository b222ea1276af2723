"""The three GEMMs of a linear layer; addends, strides and dtypes of outputs: tests/ops/test_matmul.py."""

import pytest
import torch
from torch import Tensor

from llmb.models.llama_layer.linear_gemms import Fp8LinearGemms, LinearGemms
from llmb.ops.gemm.fp8_linear import fp8_linear_reference
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2, Fp8Tensor, quantize_fp8_current_scaling

INPUTS, OUTPUTS = 48, 16


def to_fp8(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]:
    return tuple(quantize_fp8_current_scaling(*pair) for pair in ((x, E4M3), (weight, E4M3), (dy, E5M2)))


def exact(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x @ weight.T, dy @ weight, dy.T @ x


@pytest.mark.parametrize(
    ("gemms", "quantize", "reference"),
    [(LinearGemms(), lambda *plain: plain, exact), (Fp8LinearGemms(), to_fp8, fp8_linear_reference)],
    ids=["plain", "fp8"],
)
@pytest.mark.parametrize("tokens", [32, 30, 1])
def test_gemms_equal_the_reference(gemms, quantize, reference, tokens):
    shapes = ((tokens, INPUTS), (OUTPUTS, INPUTS), (tokens, OUTPUTS), (tokens, OUTPUTS))
    generator = torch.Generator().manual_seed(0)
    *plain, addend = (torch.randn(shape, generator=generator) for shape in shapes)
    x, weight, dy = quantize(*plain)
    expected = reference(*plain)
    out, dx, dweight = (torch.full_like(tensor, torch.nan) for tensor in expected)
    gemms.weight_gradient(dy, x, dweight, accumulate=False)
    added = gemms.forward(x, weight, out.clone(), addend=addend)
    assert gemms.forward(x, weight, out) is out
    torch.testing.assert_close(added, out + addend, rtol=1e-5, atol=1e-4)
    assert gemms.input_gradient(dy, weight, dx) is dx
    torch.testing.assert_close((out, dx, dweight.clone()), expected, rtol=1e-5, atol=1e-4)
    gemms.weight_gradient(dy, x, dweight, accumulate=True)
    torch.testing.assert_close(dweight, 2 * expected[2], rtol=1e-5, atol=1e-4)
