"""NVFP4 weights: rounding to nearest, and quantizing twice is quantizing once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.quant.e2m1 import MAGNITUDES
from llmb.ops.quant.nvfp4 import Nvfp4, dequantize_nvfp4, quantize_nvfp4

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 6).map(lambda groups: 16 * groups))


def randn(shape: tuple[int, ...], seed: int, spread: float = 0.0) -> Tensor:
    """Random values; with a spread, groups of them differ in magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    magnitudes = torch.randn(*shape[:-1], shape[-1] // 16, generator=generator).clamp(-2, 2).mul(spread).exp()
    return x * magnitudes.repeat_interleave(16, dim=-1)


def nearest(x: float) -> float:
    """The nearest value of the format, ties to the even code; in plain Python."""
    code = min(range(8), key=lambda number: (abs(abs(x) - MAGNITUDES[number]), number % 2))
    return math.copysign(MAGNITUDES[code], x)


@given(SHAPES, st.integers(0, 99), st.floats(0, 1.5))
@settings(max_examples=40, deadline=None)
def test_each_value_is_rounded_to_nearest(shape: tuple[int, int], seed: int, spread: float) -> None:
    weight = randn(shape, seed, spread)
    quantized = quantize_nvfp4(weight)
    assert torch.isclose(quantized.scale, weight.abs().max() / (6 * 448), rtol=1e-6)
    assert quantized.scales.float().max() == 448, "the largest value uses the whole range"
    unit = (quantized.scales.float() * quantized.scale).repeat_interleave(16, dim=-1)
    columns = (x.flatten().tolist() for x in (weight, unit, dequantize_nvfp4(quantized)))
    for value, step, rounded in zip(*columns, strict=True):
        distance = min(abs(abs(value / step) - magnitude) for magnitude in MAGNITUDES)
        assert abs(rounded / step - value / step) == pytest.approx(distance, abs=1e-5)
        assert rounded * value >= 0


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("x", [0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.3, 2.4, 5.1])
def test_ties_go_to_even(x: float, sign: int) -> None:
    weight = torch.zeros(1, 16)
    weight[0, 0], weight[0, 1] = 6.0 * 448, sign * x * 448  # the scale of the tensor is 1, that of the group 448
    assert dequantize_nvfp4(quantize_nvfp4(weight))[0, 1] == nearest(sign * x) * 448


@given(SHAPES, st.integers(0, 99), st.floats(0, 1.5))
@settings(max_examples=40, deadline=None)
def test_quantizing_again_changes_no_bit(shape: tuple[int, int], seed: int, spread: float) -> None:
    once = quantize_nvfp4(randn(shape, seed, spread))
    twice = quantize_nvfp4(dequantize_nvfp4(once))
    assert torch.equal(once.packed, twice.packed)
    assert torch.equal(once.scales.float(), twice.scales.float())
    assert torch.isclose(once.scale, twice.scale, rtol=1e-6)


def test_order_within_a_byte() -> None:
    """The earlier value is in the low half: 0x2 is 1.0, 0xF is -6.0."""
    packed = torch.zeros(1, 8, dtype=torch.uint8)
    packed[0, 0] = 0xF2
    quantized = Nvfp4(packed, torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor(0.5))
    assert dequantize_nvfp4(quantized)[0].tolist() == [0.5, -3.0] + [0.0] * 14


def test_stacks_share_one_scale() -> None:
    weight = randn((3, 4, 32), 1)
    quantized = quantize_nvfp4(weight)
    assert quantized.packed.shape == (3, 4, 16)
    assert quantized.scales.shape == (3, 4, 2)
    assert torch.equal(
        dequantize_nvfp4(quantized), dequantize_nvfp4(quantize_nvfp4(weight.flatten(0, 1))).view_as(weight)
    )


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(2, 32)
    assert torch.equal(dequantize_nvfp4(quantize_nvfp4(weight)), weight)
    weight[0, :16] = 1e20
    assert torch.equal(dequantize_nvfp4(quantize_nvfp4(weight))[1], weight[1])
