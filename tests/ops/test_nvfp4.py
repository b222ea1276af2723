"""4-bit weights: the nearest numbers of the format, and rounding twice is rounding once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.quant.nvfp4 import MAGNITUDES, Nvfp4, from_nvfp4, in_nvfp4

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 6).map(lambda groups: 16 * groups))


def drawn(shape: tuple[int, ...], seed: int, spread: float = 0.0) -> Tensor:
    """Random numbers; with a spread, groups of them differ in magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    sizes = torch.randn(*shape[:-1], shape[-1] // 16, generator=generator).clamp(-2, 2).mul(spread).exp()
    return x * sizes.repeat_interleave(16, dim=-1)


def nearest(x: float) -> float:
    """Of the format's numbers with a sign, half-way the one with the even code; in plain Python."""
    code = min(range(8), key=lambda number: (abs(abs(x) - MAGNITUDES[number]), number % 2))
    return math.copysign(MAGNITUDES[code], x)


@given(SHAPES, st.integers(0, 99), st.floats(0, 1.5))
@settings(max_examples=40, deadline=None)
def test_each_number_becomes_the_nearest_one(shape: tuple[int, int], seed: int, spread: float) -> None:
    weight = drawn(shape, seed, spread)
    made = in_nvfp4(weight)
    assert torch.isclose(made.scale, weight.abs().max() / (6 * 448), rtol=1e-6)
    assert made.scales.float().max() == 448, "the largest number uses the whole range"
    unit = (made.scales.float() * made.scale).repeat_interleave(16, dim=-1)
    for value, one, back in zip(*(t.flatten().tolist() for t in (weight, unit, from_nvfp4(made))), strict=True):
        distance = min(abs(abs(value / one) - magnitude) for magnitude in MAGNITUDES)
        assert abs(back / one - value / one) == pytest.approx(distance, abs=1e-5)
        assert back * value >= 0


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("x", [0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.3, 2.4, 5.1])
def test_half_way_is_even(x: float, sign: int) -> None:
    weight = torch.zeros(1, 16)
    weight[0, 0], weight[0, 1] = 6.0 * 448, sign * x * 448  # the scale of the tensor is 1, that of the group 448
    assert from_nvfp4(in_nvfp4(weight))[0, 1] == nearest(sign * x) * 448


@given(SHAPES, st.integers(0, 99), st.floats(0, 1.5))
@settings(max_examples=40, deadline=None)
def test_rounding_again_changes_no_bit(shape: tuple[int, int], seed: int, spread: float) -> None:
    once = in_nvfp4(drawn(shape, seed, spread))
    again = in_nvfp4(from_nvfp4(once))
    assert torch.equal(once.packed, again.packed)
    assert torch.equal(once.scales.float(), again.scales.float())
    assert torch.isclose(once.scale, again.scale, rtol=1e-6)


def test_the_order_within_a_byte() -> None:
    """The earlier number is in the low half: 0x2 is 1.0, 0xF is -6.0."""
    packed = torch.zeros(1, 8, dtype=torch.uint8)
    packed[0, 0] = 0xF2
    stored = Nvfp4(packed, torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor(0.5))
    assert from_nvfp4(stored)[0].tolist() == [0.5, -3.0] + [0.0] * 14


def test_stacks_share_one_scale() -> None:
    weight = drawn((3, 4, 32), 1)
    made = in_nvfp4(weight)
    assert made.packed.shape == (3, 4, 16)
    assert made.scales.shape == (3, 4, 2)
    assert torch.equal(from_nvfp4(made), from_nvfp4(in_nvfp4(weight.flatten(0, 1))).view_as(weight))


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(2, 32)
    assert torch.equal(from_nvfp4(in_nvfp4(weight)), weight)
    weight[0, :16] = 1e20
    assert torch.equal(from_nvfp4(in_nvfp4(weight))[1], weight[1])
