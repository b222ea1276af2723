"""The product of training, on a CPU: formats, what is added, memory of the caller's."""

import pytest
import torch
from torch import Tensor

from llmb.ops.gemm.matmul import multiply
from llmb.ops.quant.activation_quant import E4M3

M, K, N = 5, 7, 3


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_the_result_has_the_format_that_is_asked_for(wide):
    left, right = drawn(M, K, seed=0), drawn(K, N, seed=1)
    made = multiply(left, right, dtype=wide)
    assert made.dtype == wide
    torch.testing.assert_close(made, (left.double() @ right.double()).to(wide))
    assert multiply(left, right).dtype == torch.bfloat16


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_it_is_added_here_or_from_elsewhere(wide):
    left, right, onto = drawn(M, K, seed=0), drawn(K, N, seed=1), drawn(M, N, seed=2, dtype=wide)
    wanted = (onto.double() + left.double() @ right.double()).to(wide)
    here, there = onto.clone(), torch.full_like(onto, torch.nan)
    assert multiply(left, right, out=here, onto=here) is here
    assert multiply(left, right, out=there, onto=onto) is there
    for made in (here, there, multiply(left, right, onto=onto, dtype=wide)):
        torch.testing.assert_close(made, wanted)


def test_rows_apart_stay_apart():
    left, right, wide = drawn(M, K, seed=0), drawn(K, N, seed=1), torch.full((M, N + 2), 7, dtype=torch.bfloat16)
    multiply(left, right, out=wide[:, :N])
    assert torch.equal(wide[:, :N], multiply(left, right))
    assert bool((wide[:, N:] == 7).all())


def test_8_bits_are_scaled_back():
    left, right = drawn(M, K, seed=0).to(E4M3), drawn(N, K, seed=1).to(E4M3)
    scales = torch.tensor(2.0), torch.tensor(0.25)
    wanted = 0.5 * (left.float() @ right.float().T)
    torch.testing.assert_close(multiply(left, right.T, dtype=torch.float32, scales=scales), wanted)
    total = torch.ones(M, N)
    multiply(left, right.T, out=total, onto=total, scales=scales)
    torch.testing.assert_close(total, 1 + wanted)
