"""Fusions of RMSNorm against their definitions; RMSNorm: test_autograd_functions.py; kernels: op_cases/norm.py."""

import pytest
import torch
import torch.nn.functional as F
from op_cases.norm import EPS, add_rms, gated, rms_backward, rms_fp8

from llmb.ops.norm.add_rms_norm import add_rms_norm
from llmb.ops.norm.gated_norm import gated_norm
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.quant.activation_quant import E4M3

pytest.importorskip("triton")
CPU = torch.device("cpu")


def test_sum_over_rows_is_deterministic(device: torch.device) -> None:
    dweights = []
    for _ in range(2):
        arguments, _ = rms_backward(torch.Generator().manual_seed(0), device, 11, 1000, False, 1e3)
        rms_norm_backward.triton(*arguments)
        dweights.append(arguments[-2])
    assert torch.equal(*dweights)


def test_fp8_reference_is_the_norm_and_a_cast() -> None:
    (x, weight, _, norm_amax, rows, columns), _ = rms_fp8(torch.Generator(), CPU, 20, 48, "rc")
    rms_norm_fp8(x, weight, EPS, norm_amax, rows, columns)
    normed = rms_norm(x.float(), weight.float(), EPS)
    expected = (normed * norm_amax.scale.reciprocal()).clamp(-448, 448).to(E4M3).float()
    assert torch.equal(rows.float(), expected)
    assert torch.equal(columns[:, :20].float(), expected.T)
    assert (columns[:, 20:].float() == 0).all()
    assert norm_amax.amax == normed.abs().max()


def test_gated_reference_normalizes_each_group() -> None:
    (y, gate, weight, _), _ = gated(torch.Generator(), CPU, 2, 3, 3, 4)
    out = gated_norm(y, gate, weight, EPS)
    for group in range(3):
        channels = slice(4 * group, 4 * group + 4)
        product = y[..., channels] * F.silu(gate[:, :, group])
        expected = product / (product.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[channels]
        torch.testing.assert_close(out[..., channels], expected)


def test_add_rms_norm_updates_the_residual_in_place(device: torch.device) -> None:
    (x, residual, *others), _ = add_rms(torch.Generator(), device, "per_token", 3, 384, True)
    expected = x + residual
    _, total = add_rms_norm.triton(x, residual, *others)
    assert total is residual
    assert torch.equal(total, expected)
