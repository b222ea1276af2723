"""Quantization to fp8 in both layouts: the reference against its definition, and edge cases of the kernel."""

import math

import pytest
import torch
from op_cases.quant import fp8_layouts, scale_amax
from torch import Tensor

from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import (
    E5M2,
    ScaleAmax,
    cast_to_fp8,
    padded_tokens,
    quantize_fp8,
    quantize_fp8_current_scaling,
    tensor_scale,
)

pytest.importorskip("triton")

IMPLEMENTATIONS = ["triton", "reference"]


def randn(n: int, k: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * scale).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_current_scaling_divides_by_the_scale_and_rounds(dtype: torch.dtype, scale: float) -> None:
    x = randn(20, 12, scale)
    quantized = quantize_fp8_current_scaling(x, dtype)
    assert quantized.scale == tensor_scale(x, dtype)
    expected = (x.float() * quantized.scale.reciprocal()).to(dtype)
    assert same_bits(quantized.rows, expected)
    assert same_bits(quantized.columns[:, :20].contiguous(), expected.T.contiguous())
    assert (quantized.columns[:, 20:].float() == 0).all()
    assert quantized.columns.shape == (12, 32)
    measured = ScaleAmax(quantized.scale, torch.tensor(0.0))
    rows, columns = fp8_layouts(x.device, 20, 12, "rc", dtype)
    quantize_fp8(x, measured, rows, columns)
    assert same_bits(rows, quantized.rows)
    assert same_bits(columns, quantized.columns)
    assert measured.amax == x.abs().max()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (80, 48), (64, 144)], ids=str)
@pytest.mark.usefixtures("force_kernels")
def test_cast_writes_the_requested_layouts(
    dtype: torch.dtype, source: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    values = torch.randint(-8, 8, shape, device=device).float()
    x, scale = (4 * values).to(source), torch.tensor(4.0, device=device)
    all_layouts = cast_to_fp8(x, scale, dtype, rows=True, columns=True)
    rows, columns = cast_to_fp8(x, scale, dtype, rows=True), cast_to_fp8(x, scale, dtype, columns=True)
    for quantized in (all_layouts.rows, rows.rows):
        assert torch.equal(quantized.float(), values)
    for quantized in (all_layouts.columns, columns.columns):
        assert torch.equal(quantized.float(), values.T)
    assert rows.columns.numel() == columns.rows.numel() == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_overflow_is_clamped_and_recorded_in_amax(
    dtype: torch.dtype, implementation: str, device: torch.device
) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -2 * largest, 3e38, -math.inf]] * 5, device=device)
    rows, columns = fp8_layouts(device, 5, 4, "rc", dtype)
    measured = scale_amax(device, 1.0)
    getattr(quantize_fp8, implementation)(x, measured, rows, columns)
    assert rows[0].float().tolist() == [largest, -largest, largest, -largest]
    assert columns[:, 4].float().tolist() == rows[0].float().tolist()
    assert measured.amax.item() == math.inf


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_nan_stays_nan_and_dominates_amax(dtype: torch.dtype, implementation: str, device: torch.device) -> None:
    x = randn(6, 5).to(device)
    x[1, 3], x[2, 2] = math.nan, math.inf
    rows, columns = fp8_layouts(device, 6, 5, "rc", dtype)
    measured = scale_amax(device, 1.0)
    getattr(quantize_fp8, implementation)(x, measured, rows, columns)
    assert rows.float().isnan().nonzero().tolist() == [[1, 3]]
    assert columns.float().isnan().nonzero().tolist() == [[3, 1]]
    assert measured.amax.isnan()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_amax_accumulates_over_calls(implementation: str, device: torch.device) -> None:
    measured = scale_amax(device, 1.0, 3.0)
    for x, expected in ((2.0, 3.0), (-5.0, 5.0), (4.0, 5.0)):
        getattr(quantize_fp8, implementation)(torch.full((3, 3), x, device=device), measured)
        assert measured.amax.item() == expected


def test_columns_must_be_padded(device: torch.device) -> None:
    assert [padded_tokens(tokens) for tokens in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
    x = randn(17, 16).to(device)
    for width in (17, 16, 48):
        with pytest.raises(AssertionError, match="padded"):
            quantize_fp8.triton(x, scale_amax(device, 1.0), None, torch.empty(16, width, device=device).to(E4M3))
