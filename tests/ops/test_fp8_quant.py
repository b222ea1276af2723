"""Quantization to fp8: references against their definitions, and layouts of the kernels; numbers: op_cases/quant.py."""

import math
from functools import partial

import pytest
import torch
from op_cases.activation import fp8_backward
from op_cases.norm import rms_fp8
from op_cases.quant import fp8_layouts, scale_amax
from seeded_tensors import randn, same_bits

from llmb.ops.activation.glu_fp8 import glu_backward_fp8
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.quant.activation_quant import E4M3, QuantFormat, dequantize, quantize_activation
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

each_dtype = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)


@each_dtype
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_current_scaling_divides_by_the_scale_and_rounds(dtype: torch.dtype, scale: float) -> None:
    x = scale * randn(20, 12, dtype=torch.bfloat16)
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


@each_dtype
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


@each_dtype
def test_overflow_is_clamped_and_recorded_in_amax(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -2 * largest, 3e38, -math.inf]] * 5)
    rows, columns = fp8_layouts(x.device, 5, 4, "rc", dtype)
    measured = scale_amax(x.device, 1.0)
    quantize_fp8(x, measured, rows, columns)
    assert rows[0].float().tolist() == [largest, -largest, largest, -largest]
    assert columns[:, 4].float().tolist() == rows[0].float().tolist()
    assert measured.amax.item() == math.inf


@each_dtype
def test_nan_stays_nan_and_dominates_amax(dtype: torch.dtype) -> None:
    x = randn(6, 5)
    x[1, 3], x[2, 2] = math.nan, math.inf
    rows, columns = fp8_layouts(x.device, 6, 5, "rc", dtype)
    measured = scale_amax(x.device, 1.0)
    quantize_fp8(x, measured, rows, columns)
    assert rows.float().isnan().nonzero().tolist() == [[1, 3]]
    assert columns.float().isnan().nonzero().tolist() == [[3, 1]]
    assert measured.amax.isnan()


@pytest.mark.parametrize("quant_format", ["per_token", "1x128"])
def test_dequantized_activations_are_within_half_a_step(quant_format: QuantFormat) -> None:
    x = randn(6, 384)
    error = (dequantize(quantize_activation(x, quant_format), torch.float32) - x).abs()
    assert (error <= x.abs() * 2**-4 + x.abs().max() / 448 * 2**-10).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "arguments", "rows", "columns"),
    [
        (rms_norm_fp8.triton, partial(rms_fp8, n=50, c=80, which="rc"), 4, 5),
        (glu_backward_fp8.triton, partial(fp8_backward, n=300, f=70), 4, 5),
    ],
    ids=["rms_norm_fp8", "glu_backward_fp8"],
)
def test_both_layouts_of_a_fusion_have_the_same_values(kernel, arguments, rows, columns, device: torch.device) -> None:
    tensors, _ = arguments(torch.Generator(), device)
    kernel(*tensors)
    assert torch.equal(tensors[rows].float(), tensors[columns][:, : len(tensors[rows])].float().T)


def test_columns_must_be_padded(device: torch.device) -> None:
    assert [padded_tokens(tokens) for tokens in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
    x = randn(17, 16, device=device)
    for width in (17, 16, 48):
        with pytest.raises(AssertionError, match="padded"):
            quantize_fp8.triton(x, scale_amax(device, 1.0), None, torch.empty(16, width, device=device).to(E4M3))
