"""RMSNorm into fp8: the reference against the norm and a cast; its kernels: op_cases/norm.py."""

import pytest
import torch
from op_cases.quant import fp8_layouts, scale_amax
from torch import Tensor

from llmb.ops.norm.rms_norm import rms_norm
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.quant.activation_quant import E4M3

pytest.importorskip("triton")

EPS = 1e-5


def inputs(n: int, c: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + c)
    x, weight = torch.randn(n, c, generator=generator), torch.randn(c, generator=generator)
    return x.bfloat16().to(device), weight.bfloat16().to(device)


def test_reference_is_the_norm_and_a_cast() -> None:
    x, weight = inputs(20, 48, torch.device("cpu"))
    norm_amax, (rows, columns) = scale_amax(x.device, 0.011), fp8_layouts(x.device, 20, 48, "rc")
    rms_norm_fp8(x, weight, EPS, norm_amax, rows, columns)
    normed = rms_norm(x.float(), weight.float(), EPS)
    expected = (normed * norm_amax.scale.reciprocal()).clamp(-448, 448).to(E4M3).float()
    assert torch.equal(rows.float(), expected)
    assert torch.equal(columns[:, :20].float(), expected.T)
    assert (columns[:, 20:].float() == 0).all()
    assert norm_amax.amax == normed.abs().max()


def test_both_layouts_have_the_same_values(device: torch.device) -> None:
    x, weight = inputs(50, 80, device)
    rows, columns = fp8_layouts(device, 50, 80, "rc")
    rms_norm_fp8.triton(x, weight, EPS, scale_amax(device, 0.011), rows, columns)
    assert torch.equal(rows.float(), columns[:, :50].float().T)
