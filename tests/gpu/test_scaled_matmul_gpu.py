"""GEMMs of fp8 operands with many scales on a GPU, against the plain ones of the same rounded numbers."""

import pytest
import torch
from cuda_checks import GPU, HOPPER, NEEDS_GPU, randn, relative_error
from torch import Tensor

from llmb.ops.gemm.scaled_matmul import Operand, scaled_matmul
from llmb.ops.quant.vector_scaling import VECTOR_SCALINGS

pytestmark = [*NEEDS_GPU, HOPPER]


def quantized(recipe: str, x_NK: Tensor, weight: bool = False) -> tuple[Operand, Operand]:
    """Return rows and columns."""
    scales, (n, k) = VECTOR_SCALINGS[recipe](), x_NK.shape
    out = scales.empty(n, k, GPU, rows=True, columns=True, weight=weight)
    scales.quantize_(x_NK, out, weight=weight)
    return (out.rows, out.row_scales), (out.columns, out.column_scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [4096, 1023])
@pytest.mark.parametrize("recipe", VECTOR_SCALINGS)
def test_gemms_of_a_linear_layer(recipe: str, tokens: int, dtype: torch.dtype) -> None:
    x, dy = (quantized(recipe, randn(tokens, width, seed=width)) for width in (4096, 6144))
    weight = quantized(recipe, randn(6144, 4096, seed=3), weight=True)
    for left, right in ((x[0], weight[0]), (dy[0], weight[1]), (dy[1], x[1])):
        on_cpu = [tuple(each.cpu() for each in operand) for operand in (left, right)]
        shape = len(left[0]), len(right[0])
        expected = scaled_matmul(*on_cpu, torch.empty(shape))
        out = scaled_matmul(left, right, torch.empty(shape, dtype=dtype, device=GPU))
        # bf16 rounds by 2**-9 at most; fp8 tensor cores accumulate with fewer bits than fp32.
        assert relative_error(out, expected) < 0.004
        added = scaled_matmul(left, right, out.clone(), addend=out)
        assert relative_error(added, 2 * expected) < 0.004
