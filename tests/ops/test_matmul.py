"""Matmul on a CPU: dtypes, addends, output buffers of the caller."""

import pytest
import torch
from torch import Tensor

from llmb.ops.gemm.matmul import matmul
from llmb.ops.quant.activation_quant import E4M3

M, K, N = 5, 7, 3


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_result_has_the_requested_dtype(dtype):
    left, right = randn(M, K, seed=0), randn(K, N, seed=1)
    actual = matmul(left, right, dtype=dtype)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, (left.double() @ right.double()).to(dtype))
    assert matmul(left, right).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_addend_is_the_output_or_another_tensor(dtype):
    left, right, addend = randn(M, K, seed=0), randn(K, N, seed=1), randn(M, N, seed=2, dtype=dtype)
    expected = (addend.double() + left.double() @ right.double()).to(dtype)
    in_place, separate = addend.clone(), torch.full_like(addend, torch.nan)
    assert matmul(left, right, out=in_place, addend=in_place) is in_place
    assert matmul(left, right, out=separate, addend=addend) is separate
    for actual in (in_place, separate, matmul(left, right, addend=addend, dtype=dtype)):
        torch.testing.assert_close(actual, expected)


def test_output_rows_may_be_strided():
    left, right, padded = randn(M, K, seed=0), randn(K, N, seed=1), torch.full((M, N + 2), 7, dtype=torch.bfloat16)
    matmul(left, right, out=padded[:, :N])
    assert torch.equal(padded[:, :N], matmul(left, right))
    assert bool((padded[:, N:] == 7).all())


def test_fp8_operands_are_dequantized():
    left, right = randn(M, K, seed=0).to(E4M3), randn(N, K, seed=1).to(E4M3)
    scales = torch.tensor(2.0), torch.tensor(0.25)
    expected = 0.5 * (left.float() @ right.float().T)
    torch.testing.assert_close(matmul(left, right.T, dtype=torch.float32, scales=scales), expected)
    total = torch.ones(M, N)
    matmul(left, right.T, out=total, addend=total, scales=scales)
    torch.testing.assert_close(total, 1 + expected)
