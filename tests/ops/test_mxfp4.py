"""MXFP4 weights against the definition of the OCP MX specification, in plain Python."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_nvfp4 import nearest

from llmb.ops.quant.e2m1 import swizzle_e2m1, unswizzle_e2m1
from llmb.ops.quant.mxfp4 import Mxfp4, dequantize_mxfp4, quantize_mxfp4


def e2m1(code: int) -> float:
    """Decode four bits: sign, exponent with a bias of 1, mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def quantized_by_definition(values: list[float]) -> tuple[int, list[float]]:
    """Quantize one group: the shared exponent is floor(log2(amax)) - 2, values are rounded to nearest even."""
    amax = max(abs(value) for value in values)
    exponent = math.floor(math.log2(amax)) - 2
    return exponent + 127, [nearest(value / 2.0**exponent) * 2.0**exponent for value in values]


def test_codes_decode_by_their_bits() -> None:
    packed = torch.tensor([[low | (low ^ 15) << 4 for low in range(16)]], dtype=torch.uint8)  # one group of 32
    values = dequantize_mxfp4(Mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8)))[0].tolist()
    assert values == [value for low in range(16) for value in (e2m1(low), e2m1(low ^ 15))]


@pytest.mark.parametrize(("scale", "factor"), [(127, 1.0), (120, 2.0**-7), (130, 8.0), (0, 2.0**-127), (254, 2.0**127)])
def test_scales_are_powers_of_two(scale: int, factor: float) -> None:
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)  # all 1.0
    assert dequantize_mxfp4(Mxfp4(packed, torch.tensor([[scale]], dtype=torch.uint8)))[0, 0].item() == factor


def test_scale_255_is_nan() -> None:
    group = Mxfp4(torch.full((1, 16), 0x22, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8))
    assert dequantize_mxfp4(group).isnan().all()


@given(st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32), st.integers(-20, 20))
@settings(max_examples=60, deadline=None)
def test_groups_are_quantized_by_the_definition(values: list[float], power: int) -> None:
    values = [value * 2.0**power for value in values]
    if max(abs(value) for value in values) < 1e-30:
        return
    quantized = quantize_mxfp4(torch.tensor([values]))
    scale, expected = quantized_by_definition(values)
    assert quantized.scales.item() == scale
    assert dequantize_mxfp4(quantized)[0].tolist() == expected


def test_quantizing_again_keeps_all_values_of_any_scale() -> None:
    """Also of files whose scales follow another rule: a scale may be larger than values need."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(256, (64, 32), generator=generator, dtype=torch.uint8)
    packed[:16] &= 0x99  # 0 and 0.5 only
    packed[16:32] &= 0xBB  # up to 1.5
    packed[32] = 0
    scales = torch.randint(110, 130, (64, 2), generator=generator, dtype=torch.uint8)
    stored = dequantize_mxfp4(Mxfp4(packed, scales))
    requantized = quantize_mxfp4(stored)
    assert torch.equal(dequantize_mxfp4(requantized), stored)
    assert torch.equal(quantize_mxfp4(dequantize_mxfp4(requantized)).scales, requantized.scales)


def test_swizzled_words_hold_the_pairs_of_a_thread() -> None:
    codes = torch.randint(16, (3, 64), generator=torch.Generator().manual_seed(0))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    swizzled = swizzle_e2m1(packed)
    words = swizzled.view(torch.int32)
    for group, thread, pair in itertools.product(range(2), range(4), range(4)):
        first, second = (words[:, 4 * group + thread] >> 4 * pair + half & 15 for half in (0, 16))
        k = 32 * group + 8 * pair + 2 * thread
        assert (first == codes[:, k]).all()
        assert (second == codes[:, k + 1]).all()
    assert torch.equal(unswizzle_e2m1(swizzled), packed)
