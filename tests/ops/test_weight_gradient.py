"""Weight gradients in place: the first of a step is written to `main_grad`, later ones are added to it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from llmb.models.chunked_loss import chunked_cross_entropy
from llmb.ops.activation.activation_autograd import gated_mlp
from llmb.ops.embedding.embedding_autograd import fused_embedding
from llmb.ops.gemm.fp8_linear import OperandNames, fp8_linear
from llmb.ops.gemm.linear_autograd import linear
from llmb.ops.moe.fp8_grouped_gemm import fp8_grouped_gemm
from llmb.ops.moe.grouped_gemm import grouped_gemm
from llmb.ops.quant.delayed_scaling import CurrentScaling

NAMES = OperandNames("x", "weight", "dy")
CURRENT = CurrentScaling(NAMES.dtypes, torch.device("cpu"))
ENDS = torch.tensor([16, 48], dtype=torch.int32)
TOKENS = torch.arange(48) % 32
OTHER = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))

# Loss of activations [48, 32] and a weight [32, 32], or [2, 32, 32].
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, weight: linear(x, weight).float().square().sum(),
    "fp8_linear": lambda x, weight: fp8_linear(x, weight, CURRENT, NAMES).float().square().sum(),
    "gated_mlp": lambda x, weight: gated_mlp(x, OTHER, weight, OTHER).float().square().sum(),
    "embedding": lambda x, weight: (fused_embedding(TOKENS, weight) * x).float().square().sum(),
    "chunked_loss": lambda x, weight: chunked_cross_entropy(x, weight, TOKENS, chunk=16),
    "grouped_gemm": lambda x, weight: grouped_gemm(x, weight, ENDS).float().square().sum(),
    "fp8_grouped_gemm": lambda x, weight: fp8_grouped_gemm(x, weight, ENDS).float().square().sum(),
}


def new_weight(name: str, dtype: torch.dtype, grad_dtype: torch.dtype = torch.float32) -> nn.Parameter:
    shape = (2, 32, 32) if "grouped" in name else (32, 32)
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype))
    weight.grad_dtype = grad_dtype
    return weight


def add_gradient(name: str, weight: Tensor, micro_batch: int) -> None:
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(micro_batch)).bfloat16().requires_grad_()
    FUNCTIONS[name](x, weight).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_main_grad_is_written_then_accumulated_into(name: str, dtype: torch.dtype) -> None:
    plain, weight = new_weight(name, dtype), new_weight(name, dtype)
    weight.main_grad = torch.full_like(weight, math.nan, dtype=torch.float32)
    for micro_batch in range(3):
        for each in (plain, weight):
            add_gradient(name, each, micro_batch)
        assert weight.grad is weight.main_grad
        assert torch.equal(weight.grad, plain.grad)
        assert plain.grad.any()


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_accumulate_in_place_unless_hooks_see_them(
    name: str, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    weight, hooked = (new_weight(name, dtype, grad_dtype) for _ in range(2))
    seen: list[Tensor] = []
    hooked.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    hooked.main_grad = torch.full_like(hooked, math.nan, dtype=grad_dtype)
    addresses = set()
    for micro_batch in range(3):
        for each in (weight, hooked):
            add_gradient(name, each, micro_batch)
        addresses.add(weight.grad.data_ptr())
        assert weight.grad.dtype == seen[micro_batch].dtype == grad_dtype
        assert_close(weight.grad, seen[micro_batch])
    assert (len(addresses), len(seen)) == (1, 3)
    assert hooked.main_grad.isnan().all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weight_that_is_not_a_leaf(name: str) -> None:
    weight, scaled = (new_weight(name, torch.float32) for _ in range(2))
    scaled.data /= 2
    for micro_batch in range(2):
        add_gradient(name, weight, micro_batch)
        add_gradient(name, scaled * 2, micro_batch)
    assert_close(scaled.grad, 2 * weight.grad)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-6 if actual.dtype == torch.float32 else 0.01
    assert (actual.float() - expected.float()).norm() <= tolerance * expected.float().norm()
