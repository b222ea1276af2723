"""Linear layers of every format against a gemm of operands quantized step by step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.quant.activation_quant import dequantize, quantize_activation
from llmb.ops.quant.fp8_quant import fake_quantize as rounded_to
from llmb.ops.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from llmb.serve.layers.served_linear import Format, build_linear, supported_format

E4M3 = torch.float8_e4m3fn
FORMATS: list[Format] = ["plain", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"]
TOKENS, BLOCKS = st.integers(1, 40), st.integers(1, 3)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded_weight(weight_OK: Tensor, format: Format) -> Tensor:
    """Quantize one scale block at a time."""
    if format == "nvfp4":
        return dequantize_nvfp4(quantize_nvfp4(weight_OK))
    if format == "plain":
        return weight_OK
    outputs, inputs = weight_OK.shape
    parts = {"fp8_tensor": (outputs, inputs), "fp8_channel": (1, inputs), "fp8_block": (128, 128)}
    down, along = parts[format]
    actual = torch.empty_like(weight_OK)
    for top in range(0, outputs, down):
        for left in range(0, inputs, along):
            part = (slice(top, top + down), slice(left, left + along))
            values, scale = rounded_to(weight_OK[part], E4M3)
            actual[part] = values * scale
    return actual


def rounded_input(x_NK: Tensor, format: Format) -> Tensor:
    if format == "fp8_tensor":
        values, scale = rounded_to(x_NK, E4M3)
        return values * scale
    form = {"fp8_channel": "per_token", "fp8_block": "1x128"}.get(format, "plain")
    return dequantize(quantize_activation(x_NK, form), torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
@given(tokens=TOKENS, outputs=st.integers(1, 12).map(lambda n: 16 * n), blocks=BLOCKS, seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_layer_equals_gemm_of_quantized_operands(
    format: Format, tokens: int, outputs: int, blocks: int, seed: int
) -> None:
    x, weight = randn(tokens, 128 * blocks, seed=seed), randn(outputs, 128 * blocks, seed=seed + 100)
    layer = build_linear(weight, format=format, dtype=torch.float32)
    actual = layer(quantize_activation(x, layer.input_format))
    expected = rounded_input(x, format) @ rounded_weight(weight, format).T
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert layer.dequantised == (format == "nvfp4")


@pytest.mark.parametrize("format", FORMATS)
def test_output_has_the_model_dtype(format: Format) -> None:
    layer = build_linear(randn(32, 128), format=format, dtype=torch.bfloat16)
    actual = layer(quantize_activation(randn(5, 128).bfloat16(), layer.input_format))
    assert actual.dtype == torch.bfloat16
    assert actual.shape == (5, 32)


@pytest.mark.parametrize("format", FORMATS)
def test_quantization_error_of_each_format(format: Format) -> None:
    x, weight = randn(64, 256), randn(128, 256, seed=1)
    layer = build_linear(weight, format=format, dtype=torch.float32)
    exact = x @ weight.T
    error = ((layer(quantize_activation(x, layer.input_format)) - exact).norm() / exact.norm()).item()
    low, high = {"plain": (0, 1e-6), "nvfp4": (0.05, 0.12)}.get(format, (0.02, 0.05))
    assert low <= error < high


def test_bytes_of_values_and_scales() -> None:
    weight = randn(256, 512)
    count = weight.numel()
    actual = {format: build_linear(weight, format=format, dtype=torch.bfloat16).bytes for format in FORMATS}
    assert actual == {
        "plain": 2 * count,
        "fp8_tensor": count + 4 * 256,  # one scale per output
        "fp8_channel": count + 4 * 256,
        "fp8_block": count + 4 * 2 * 4,
        "nvfp4": 2 * count,  # dequantized
    }


@pytest.mark.parametrize(
    ("format", "shape", "fits"),
    [
        ("fp8_tensor", (32, 48), True),
        ("fp8_tensor", (32, 40), False),
        ("fp8_channel", (24, 48), False),
        ("fp8_block", (7, 256), True),
        ("fp8_block", (128, 192), False),
        ("nvfp4", (3, 48), True),
        ("nvfp4", (3, 40), False),
    ],
)
def test_unsupported_shape_stays_plain(format: Format, shape: tuple[int, int], fits: bool) -> None:
    assert supported_format(format, *shape) == (format if fits else "plain")
    x, weight = randn(3, shape[1]), randn(*shape)
    layer = build_linear(weight, format=format, dtype=torch.float32)
    assert torch.equal(layer(quantize_activation(x, layer.input_format)), x @ weight.T) != fits
    assert layer.dequantised == (fits and format == "nvfp4")


def test_static_input_scale() -> None:
    x, weight = randn(4, 32), randn(16, 32, seed=1)
    scale = torch.tensor(0.01)
    layer = build_linear(weight, format="fp8_tensor", dtype=torch.float32, input_scale=scale)
    input_NK = (x / scale).to(E4M3).float() * scale
    expected = input_NK @ rounded_weight(weight, "fp8_tensor").T
    assert (layer(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    separate = layer(x[:1])
    assert torch.equal(separate, layer(x)[:1]), "other tokens of the batch do not matter"


def test_input_beyond_static_scale_saturates() -> None:
    layer = build_linear(torch.eye(16), format="fp8_tensor", dtype=torch.float32, input_scale=torch.tensor(1.0))
    actual = layer(torch.full((1, 16), 1e6))
    assert torch.isclose(actual, torch.tensor(448.0), rtol=1e-6).all()


@pytest.mark.parametrize("format", FORMATS[1:])
def test_quantization_is_idempotent(format: Format) -> None:
    """So a weight stored in a format is served with the values of the file."""
    weight = randn(64, 256)
    quantized_once = rounded_weight(weight, format)
    x = randn(3, 256, seed=5)
    first, second = (build_linear(w, format=format, dtype=torch.float32) for w in (weight, quantized_once))
    first_out, second_out = (layer(quantize_activation(x, layer.input_format)) for layer in (first, second))
    assert torch.allclose(first_out, second_out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["plain", "fp8_tensor", "fp8_channel", "nvfp4"])
def test_fused_weights_are_quantized_separately(format: Format) -> None:
    large, small = randn(32, 128), randn(64, 128) * 1e-3
    x = randn(5, 128)
    fused = build_linear(large, small, format=format, dtype=torch.float32)
    separate = [build_linear(w, format=format, dtype=torch.float32) for w in (large, small)]
    expected = torch.cat([layer(quantize_activation(x, layer.input_format)) for layer in separate], dim=1)
    torch.testing.assert_close(fused(quantize_activation(x, fused.input_format)), expected, rtol=1e-5, atol=1e-6)
