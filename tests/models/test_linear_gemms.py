"""The three GEMMs of a linear layer: output buffers, accumulation, other dtypes and strides."""

import pytest
import torch
from torch import Tensor

from llmb.models.llama_layer.linear_gemms import Fp8LinearGemms, LinearGemms
from llmb.ops.gemm.fp8_linear import fp8_linear_reference
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2, Fp8Tensor, quantize_fp8_current_scaling

TOKENS, INPUTS, OUTPUTS = 32, 48, 16


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((tokens, INPUTS), (OUTPUTS, INPUTS), (tokens, OUTPUTS))
    return tuple(randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))  # type: ignore[return-value]


def to_fp8(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]:
    return tuple(quantize_fp8_current_scaling(*pair) for pair in ((x, E4M3), (weight, E4M3), (dy, E5M2)))


def exact(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x @ weight.T, dy @ weight, dy.T @ x


def nan_buffer(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize(
    ("gemms", "quantize", "reference"),
    [(LinearGemms(), lambda *plain: plain, exact), (Fp8LinearGemms(), to_fp8, fp8_linear_reference)],
    ids=["plain", "fp8"],
)
@pytest.mark.parametrize("tokens", [TOKENS, 30, 1])
def test_gemms_equal_the_reference(gemms, quantize, reference, tokens):
    plain = operands(tokens=tokens)
    x, weight, dy = quantize(*plain)
    expected = reference(*plain)
    dweight = nan_buffer((OUTPUTS, INPUTS))
    gemms.weight_gradient(dy, x, dweight, accumulate=False)
    out, dx = nan_buffer((tokens, OUTPUTS)), nan_buffer((tokens, INPUTS))
    assert gemms.forward(x, weight, out) is out
    assert gemms.input_gradient(dy, weight, dx) is dx
    torch.testing.assert_close((out, dx, dweight.clone()), expected, rtol=1e-5, atol=1e-4)
    gemms.weight_gradient(dy, x, dweight, accumulate=True)
    torch.testing.assert_close(dweight, 2 * expected[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("gemms", "quantize"), [(LinearGemms(), lambda *plain: plain), (Fp8LinearGemms(), to_fp8)], ids=["plain", "fp8"]
)
def test_forward_adds_an_addend(gemms, quantize):
    x, weight, _ = quantize(*operands())
    product, base = gemms.forward(x, weight, nan_buffer((TOKENS, OUTPUTS))), randn(TOKENS, OUTPUTS, seed=9)
    separate, in_place = nan_buffer((TOKENS, OUTPUTS)), base.clone()
    assert gemms.forward(x, weight, separate, addend=base) is separate
    assert gemms.forward(x, weight, in_place, addend=in_place) is in_place
    for actual in (separate, in_place):
        torch.testing.assert_close(actual, base + product, rtol=1e-5, atol=1e-4)


def test_outputs_may_be_strided_or_newly_allocated():
    """As those of the LM head."""
    x, weight, dy = operands()
    padded = torch.full((TOKENS, OUTPUTS + 5), 7.0)
    returned = LinearGemms().forward(x, weight, out=padded[:, :OUTPUTS])
    assert returned.data_ptr() == padded.data_ptr()
    torch.testing.assert_close(padded[:, :OUTPUTS], LinearGemms().forward(x, weight))
    assert bool((padded[:, OUTPUTS:] == 7).all())
    dx = randn(TOKENS, INPUTS, seed=8)
    expected = dx + LinearGemms().input_gradient(dy, weight)
    assert LinearGemms().input_gradient(dy, weight, out=dx, addend=dx) is dx
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("gemms", "quantize"), [(LinearGemms(), lambda *plain: plain), (Fp8LinearGemms(), to_fp8)], ids=["plain", "fp8"]
)
def test_fp32_gradients_keep_the_precision_of_their_operands(gemms, quantize):
    plain = operands(torch.bfloat16)
    x, _, dy = quantize(*plain)
    dweight = torch.zeros(OUTPUTS, INPUTS)
    for _ in range(3):
        gemms.weight_gradient(dy, x, dweight, accumulate=True)
    once = nan_buffer((OUTPUTS, INPUTS))
    gemms.weight_gradient(dy, x, once, accumulate=False)
    torch.testing.assert_close(dweight, 3 * once, rtol=1e-5, atol=1e-5)
    if isinstance(gemms, LinearGemms):
        torch.testing.assert_close(once, plain[2].float().T @ plain[0].float(), rtol=1e-5, atol=1e-5)
