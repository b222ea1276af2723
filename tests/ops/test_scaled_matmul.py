"""GEMMs of fp8 operands with many scales: quantization in both layouts, and the three GEMMs of a linear layer."""

import pytest
import torch
from seeded_tensors import randn
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import quantize_blocks
from llmb.ops.gemm.scaled_matmul import Operand, scaled_matmul
from llmb.ops.quant.activation_quant import quantize_activation
from llmb.ops.quant.scaled_fp8 import ScaledFp8
from llmb.ops.quant.vector_scaling import VECTOR_SCALINGS, RowwiseScaling

CPU = torch.device("cpu")
each_recipe = pytest.mark.parametrize("recipe", VECTOR_SCALINGS)


def quantized(recipe: str, x_NK: Tensor, weight: bool = False) -> ScaledFp8:
    scales = VECTOR_SCALINGS[recipe]()
    out = scales.empty(*x_NK.shape, x_NK.device, rows=True, columns=True, weight=weight)
    scales.quantize_(x_NK, out, weight=weight)
    return out


def operands(x: ScaledFp8) -> tuple[Operand, Operand]:
    return (x.rows, x.row_scales), (x.columns, x.column_scales)


def uneven(*shape: int) -> Tensor:
    """Rows and columns of very different magnitudes: one scale for all would round most of them to zero."""
    n, k = shape
    return randn(*shape) * torch.logspace(-4, 4, n)[:, None] * torch.logspace(-3, 3, k).roll(k // 2)


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """The definition, value by value."""
    n, k = values.shape
    rows = torch.arange(n) * len(scales) // n
    groups = torch.zeros(k, dtype=torch.long) if scales.shape[1] == 1 else torch.arange(k) // 128
    return values.double() * scales.double()[rows[:, None], groups[None, :]]


@each_recipe
@pytest.mark.parametrize("weight", [False, True])
def test_values_times_scales_are_the_matrix_in_either_layout(recipe: str, weight: bool) -> None:
    x = uneven(256, 384).bfloat16()
    rows, columns = operands(quantized(recipe, x, weight))
    exact = x.double()
    if weight and recipe == "blockwise":  # one scale for values of different magnitudes
        assert torch.equal(rows[0].float(), columns[0].float().T)
        x8 = quantize_blocks(x)
        assert torch.equal(x8.values.float(), rows[0].float())
        assert torch.equal(x8.scales, rows[1])
        return
    for layout, reference in ((dequantized(*rows), exact), (dequantized(*columns), exact.T)):
        largest = reference.unflatten(1, (-1, 128 if recipe == "blockwise" else 384 if reference is exact else 256))
        limit = largest.abs().amax(2, keepdim=True).expand_as(largest).flatten(1)
        # Half a unit in the last of four places, or half the smallest subnormal number.
        assert ((layout - reference).abs() <= reference.abs() / 16 + limit * (2**-10 / 448) * 1.01).all()


@each_recipe
def test_rows_are_those_that_serving_quantizes(recipe: str) -> None:
    x = uneven(40, 256).bfloat16()
    served, trained = quantize_activation(x, "per_token" if recipe == "rowwise" else "1x128"), quantized(recipe, x)
    assert torch.equal(served.values.float(), trained.rows.float())
    assert torch.equal(served.scales, trained.row_scales)


@each_recipe
def test_padding_of_columns_is_zero(recipe: str) -> None:
    x8 = quantized(recipe, randn(21, 128))
    assert x8.columns.shape == (128, 32 if recipe == "rowwise" else 128)
    assert (x8.columns[:, 21:].float() == 0).all()
    assert (x8.columns[:, :21].float() != 0).any()


@each_recipe
@pytest.mark.parametrize("tokens", [128, 200])
def test_gemms_are_those_of_dequantized_operands(recipe: str, tokens: int) -> None:
    x, dy = quantized(recipe, randn(tokens, 256, seed=1)), quantized(recipe, randn(tokens, 384, seed=2))
    weight = quantized(recipe, randn(384, 256, seed=3), weight=True)
    (x_rows, x_columns), (dy_rows, dy_columns), (w_rows, w_columns) = map(operands, (x, dy, weight))
    for left, right in ((x_rows, w_rows), (dy_rows, w_columns), (dy_columns, x_columns)):
        expected = dequantized(*left) @ dequantized(*right).T
        out = scaled_matmul(left, right, torch.empty(expected.shape))
        assert (out - expected).norm() < 1e-6 * expected.norm()
        addend = torch.ones_like(out)
        assert torch.equal(scaled_matmul(left, right, torch.empty_like(out), addend), out + 1)
        assert torch.equal(scaled_matmul(left, right, addend, addend), out + 1)
        assert addend[0, 0] == out[0, 0] + 1


@each_recipe
def test_split_rows_give_the_columns_of_the_whole_output(recipe: str) -> None:
    x, weight = quantized(recipe, randn(16, 128)), quantized(recipe, randn(512, 128, seed=4), weight=True)
    whole = scaled_matmul(*((y.rows, y.row_scales) for y in (x, weight)), torch.empty(16, 512))
    for shard, expected in zip(weight.split_rows((256, 128, 128)), whole.split((256, 128, 128), dim=1), strict=True):
        actual = scaled_matmul((x.rows, x.row_scales), (shard.rows, shard.row_scales), torch.empty(expected.shape))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_reduced_amaxes_scale_rows_and_columns() -> None:
    scales, x = RowwiseScaling(), torch.ones(4, 32)
    out = scales.empty(4, 32, CPU, rows=True, columns=True)
    three = torch.tensor(3.0).view(torch.int32)
    scales.quantize_(x, out, (None, lambda bits: bits.copy_(three)))
    assert (out.rows.float() == 448).all()
    torch.testing.assert_close(out.column_scales, torch.full((32, 1), 3 / 448))
