"""Each format's layer against a plain product of numbers that were rounded in the same way, step by step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.gemm.fp8_linear import rounded as rounded_to
from llmb.ops.quant.activation_quant import as_plain, in_form
from llmb.ops.quant.nvfp4 import from_nvfp4, in_nvfp4
from llmb.serve.layers.served_linear import Format, fitting, linear

E4M3 = torch.float8_e4m3fn
FORMATS: list[Format] = ["plain", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"]
TOKENS, BLOCKS = st.integers(1, 40), st.integers(1, 3)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded_weight(weight_OK: Tensor, format: Format) -> Tensor:
    """With the rounding of one part at a time spelled out."""
    if format == "nvfp4":
        return from_nvfp4(in_nvfp4(weight_OK))
    if format == "plain":
        return weight_OK
    outputs, inputs = weight_OK.shape
    parts = {"fp8_tensor": (outputs, inputs), "fp8_channel": (1, inputs), "fp8_block": (128, 128)}
    down, along = parts[format]
    found = torch.empty_like(weight_OK)
    for top in range(0, outputs, down):
        for left in range(0, inputs, along):
            part = (slice(top, top + down), slice(left, left + along))
            values, scale = rounded_to(weight_OK[part], E4M3)
            found[part] = values * scale
    return found


def rounded_input(x_NK: Tensor, format: Format) -> Tensor:
    if format == "fp8_tensor":
        values, scale = rounded_to(x_NK, E4M3)
        return values * scale
    form = {"fp8_channel": "rows8", "fp8_block": "groups8"}.get(format, "plain")
    return as_plain(in_form(x_NK, form), torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
@given(tokens=TOKENS, outputs=st.integers(1, 12).map(lambda n: 16 * n), blocks=BLOCKS, seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_a_layer_is_the_product_of_rounded_numbers(
    format: Format, tokens: int, outputs: int, blocks: int, seed: int
) -> None:
    x, weight = drawn(tokens, 128 * blocks, seed=seed), drawn(outputs, 128 * blocks, seed=seed + 100)
    layer = linear(weight, format=format, dtype=torch.float32)
    found = layer(in_form(x, layer.form))
    wanted = rounded_input(x, format) @ rounded_weight(weight, format).T
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert layer.dequantised == (format == "nvfp4")


@pytest.mark.parametrize("format", FORMATS)
def test_what_comes_out_is_in_the_format_of_the_stream(format: Format) -> None:
    layer = linear(drawn(32, 128), format=format, dtype=torch.bfloat16)
    found = layer(in_form(drawn(5, 128).bfloat16(), layer.form))
    assert found.dtype == torch.bfloat16
    assert found.shape == (5, 32)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_near_the_truth_but_the_rounding(format: Format) -> None:
    x, weight = drawn(64, 256), drawn(128, 256, seed=1)
    layer = linear(weight, format=format, dtype=torch.float32)
    exact = x @ weight.T
    error = ((layer(in_form(x, layer.form)) - exact).norm() / exact.norm()).item()
    low, high = {"plain": (0, 1e-6), "nvfp4": (0.05, 0.12)}.get(format, (0.02, 0.05))
    assert low <= error < high


def test_bytes_are_those_of_values_and_scales() -> None:
    weight = drawn(256, 512)
    count = weight.numel()
    found = {format: linear(weight, format=format, dtype=torch.bfloat16).bytes for format in FORMATS}
    assert found == {
        "plain": 2 * count,
        "fp8_tensor": count + 4 * 256,  # of the part that an output belongs to
        "fp8_channel": count + 4 * 256,
        "fp8_block": count + 4 * 2 * 4,
        "nvfp4": 2 * count,  # widened, and says so
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
def test_a_shape_that_a_format_cannot_take_stays_plain(format: Format, shape: tuple[int, int], fits: bool) -> None:
    assert fitting(format, *shape) == (format if fits else "plain")
    x, weight = drawn(3, shape[1]), drawn(*shape)
    layer = linear(weight, format=format, dtype=torch.float32)
    assert torch.equal(layer(in_form(x, layer.form)), x @ weight.T) != fits
    assert layer.dequantised == (fits and format == "nvfp4")


def test_a_known_scale_of_the_input() -> None:
    x, weight = drawn(4, 32), drawn(16, 32, seed=1)
    scale = torch.tensor(0.01)
    layer = linear(weight, format="fp8_tensor", dtype=torch.float32, input_scale=scale)
    input_NK = (x / scale).to(E4M3).float() * scale
    wanted = input_NK @ rounded_weight(weight, "fp8_tensor").T
    assert (layer(x) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    alone = layer(x[:1])
    assert torch.equal(alone, layer(x)[:1]), "neighbours do not matter"


def test_an_input_beyond_a_known_scale_is_clipped() -> None:
    layer = linear(torch.eye(16), format="fp8_tensor", dtype=torch.float32, input_scale=torch.tensor(1.0))
    found = layer(torch.full((1, 16), 1e6))
    assert torch.isclose(found, torch.tensor(448.0), rtol=1e-6).all()


@pytest.mark.parametrize("format", FORMATS[1:])
def test_rounding_twice_is_rounding_once(format: Format) -> None:
    """So a weight that was stored in a format is served with the values of the file."""
    weight = drawn(64, 256)
    once = rounded_weight(weight, format)
    x = drawn(3, 256, seed=5)
    first, second = (linear(one, format=format, dtype=torch.float32) for one in (weight, once))
    ours, theirs = (layer(in_form(x, layer.form)) for layer in (first, second))
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["plain", "fp8_tensor", "fp8_channel", "nvfp4"])
def test_weights_put_together_are_rounded_as_if_each_stood_alone(format: Format) -> None:
    large, small = drawn(32, 128), drawn(64, 128) * 1e-3
    x = drawn(5, 128)
    together = linear(large, small, format=format, dtype=torch.float32)
    alone = [linear(one, format=format, dtype=torch.float32) for one in (large, small)]
    wanted = torch.cat([layer(in_form(x, layer.form)) for layer in alone], dim=1)
    torch.testing.assert_close(together(in_form(x, together.form)), wanted, rtol=1e-5, atol=1e-6)
