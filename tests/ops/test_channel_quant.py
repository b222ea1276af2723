"""Frozen weights in fp8: scales, the error of rounding, and widening that rounds nothing."""

import torch

from llmb.ops.quant.activation_quant import E4M3, E4M3_MAX
from llmb.ops.quant.channel_quant import BLOCK, ChannelFp8, channel_scales, quantize_channels_


def quantized(weight: torch.Tensor) -> ChannelFp8:
    out = ChannelFp8(torch.empty(weight.shape, dtype=E4M3), torch.empty(len(weight)))
    quantize_channels_(weight, out)
    return out


def test_scales_are_the_least_powers_of_two_that_hold_a_row() -> None:
    amax = torch.tensor([448.0, 448.1, 224.0, 1.75, 1e-3, 3e4])
    scales = channel_scales(amax[:, None] * torch.tensor([1.0, -0.5]))
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    assert (amax / scales <= E4M3_MAX).all()
    assert (amax / (scales / 2) > E4M3_MAX).all()
    assert scales[:3].tolist() == [1.0, 2.0, 0.5]


def test_values_keep_three_bits_of_mantissa_and_zero_rows_stay_zero() -> None:
    weight = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 64)[:, None]
    weight[5] = 0.0
    widened = quantized(weight).widened(torch.float32)
    error = (widened - weight).abs()
    smallest_normal = channel_scales(weight)[:, None] * 2.0**-6
    assert (error <= torch.maximum(weight.abs() / 16, smallest_normal / 16)).all()
    assert not widened[5].any()


def test_widening_to_bf16_rounds_nothing() -> None:
    weight = quantized(torch.randn(32, 128, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(weight.widened(torch.bfloat16).float(), weight.widened(torch.float32))


def test_blocks_of_rows_give_the_same_bits(monkeypatch) -> None:
    weight = torch.randn(10, 8, generator=torch.Generator().manual_seed(3))
    whole = quantized(weight)
    monkeypatch.setattr("llmb.ops.quant.channel_quant.BLOCK", 24)
    assert weight.numel() < BLOCK
    assert torch.equal(quantized(weight).widened(torch.float32), whole.widened(torch.float32))
