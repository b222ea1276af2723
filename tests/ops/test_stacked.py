"""Matrices of experts, rounded one after the other into a stack: what comes back is as near as the format allows."""

import pytest
import torch

from llmb.ops.moe.expert_weights import Kind, empty_stack, fill_rows, plain_matrix
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.nvfp4 import from_nvfp4, in_nvfp4

CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.mark.parametrize("kind", ["rows8", "groups8"])
def test_matrices_are_rounded_to_three_bits_of_mantissa(kind: Kind) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    weight[:128] *= 1e-3
    stack = empty_stack((2, 512, 384), kind, FP32, CPU)
    fill_rows(stack, 1, 256, weight)
    error = (plain_matrix(stack, 1)[256:] - weight).abs()
    upper, lower = weight[:128].abs().max(), weight[128:].abs().max()
    largest = (
        weight.abs().amax(1, keepdim=True) if kind == "rows8" else torch.stack((upper, lower)).repeat_interleave(128)
    )
    assert (error <= weight.abs() * 2.0**-4 + largest.view(-1, 1) * 2.0**-9 / 448).all()
    assert error.max() > 0


def test_one_scale_for_a_matrix() -> None:
    stack = empty_stack((2, 6, 8), "rows8", FP32, CPU)
    for expert in range(2):
        fill_rows(stack, expert, 0, torch.randn(6, 8, generator=torch.Generator().manual_seed(expert)), alike=True)
    assert stack.scales is not None
    assert (stack.scales == stack.scales[:, :1]).all()
    assert stack.scales[0, 0] != stack.scales[1, 0]
    assert (stack.values.float().abs().amax(dim=(1, 2)) == torch.finfo(E4M3).max).all()


def test_matrices_in_4_bits_keep_their_own_scales() -> None:
    gate, up = (size * torch.randn(24, 32, generator=torch.Generator().manual_seed(2)) for size in (1.0, 30.0))
    stack = empty_stack((3, 48, 32), "nvfp4", FP32, CPU)
    fill_rows(stack, 2, 0, gate)
    fill_rows(stack, 2, 24, up)
    assert (stack.inputs, stack.form) == (32, "plain")
    assert torch.equal(plain_matrix(stack, 2), torch.cat([from_nvfp4(in_nvfp4(one)) for one in (gate, up)]))


def test_plain_matrices_stay_as_they_are() -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).bfloat16()
    stack = empty_stack((1, 4, 6), "plain", torch.bfloat16, CPU)
    fill_rows(stack, 0, 0, weight)
    assert torch.equal(plain_matrix(stack, 0), weight.float())
