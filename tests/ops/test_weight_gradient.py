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


def new_weight(name: str, dtype: torch.dtype) -> nn.Parameter:
    shape = (2, 32, 32) if "grouped" in name else (32, 32)
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype))
    weight.grad_dtype = torch.float32
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_main_grad_is_written_then_accumulated_into(name: str, dtype: torch.dtype) -> None:
    plain, weight = new_weight(name, dtype), new_weight(name, dtype)
    weight.main_grad = torch.full_like(weight, math.nan, dtype=torch.float32)
    for micro_batch in range(3):
        x = torch.randn(48, 32, generator=torch.Generator().manual_seed(micro_batch)).bfloat16().requires_grad_()
        for each in (plain, weight):
            FUNCTIONS[name](x, each).backward()
        assert weight.grad is weight.main_grad
        assert torch.equal(weight.grad, plain.grad)
        assert plain.grad.any()


def test_gradients_with_hooks_go_through_autograd() -> None:
    weight, seen = new_weight("linear", torch.float32), []
    weight.main_grad = torch.full_like(weight, math.nan)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for _ in range(2):
        linear(torch.ones(4, 32), weight).sum().backward()
    assert torch.equal(seen[1], 2 * seen[0])
    assert weight.main_grad.isnan().all()
