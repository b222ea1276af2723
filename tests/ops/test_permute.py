"""Permutation of tokens to experts and back with autograd, plain and by the kernels; numbers: op_cases/moe.py."""

import pytest
import torch
from op_cases.moe import uneven_topk_ids
from seeded_tensors import randn
from torch import Tensor

from llmb.ops.moe.permute import permute_tokens_with_input, sort_by_expert, unpermute_tokens

pytestmark = pytest.mark.usefixtures("implementation")


def row_map_of(tokens: int, top_k: int, experts: int, device: torch.device) -> Tensor:
    return sort_by_expert(uneven_topk_ids(torch.Generator(), device, tokens, top_k, experts), experts)[0]


def output_and_grads(out: Tensor, d_out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("shape", "experts"), [((33, 3), 7), ((1, 1), 1), ((128, 1), 3), ((300, 2), 5), ((129,), 2), ((50, 8), 256)]
)
def test_sort_by_expert_is_stable(
    device: torch.device, shape: tuple[int, ...], experts: int, dtype: torch.dtype
) -> None:
    likely = max(experts - 2, 1)  # nobody is routed to the last
    topk_ids = torch.randint(likely, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    row_map, ends = sort_by_expert(topk_ids.to(device), experts)
    assert row_map.shape == topk_ids.shape
    assert row_map.dtype == ends.dtype == torch.int32
    order = sorted(range(topk_ids.numel()), key=lambda pair: (topk_ids.flatten()[pair].item(), pair))
    assert row_map.flatten()[order].tolist() == list(range(topk_ids.numel()))
    assert ends.tolist() == topk_ids.flatten().bincount(minlength=experts).cumsum(0).tolist()


def test_gradients_of_permuted_rows_and_of_the_input_are_added(device: torch.device) -> None:
    row_map, x = row_map_of(37, 8, 16, device), randn(37, 96, device=device).requires_grad_()
    drows, d_input = randn(296, 96, seed=1, device=device), randn(37, 96, seed=2, device=device)
    rows, same_x = permute_tokens_with_input(x, row_map)
    assert torch.equal(same_x, x)
    (dx,) = torch.autograd.grad((rows, same_x), x, (drows, d_input), retain_graph=True)
    torch.testing.assert_close(dx, drows[row_map.long()].sum(1) + d_input)
    assert torch.equal(torch.autograd.grad(same_x, x, d_input)[0], d_input)


def test_unpermute_backward_of_an_expanded_gradient(device: torch.device) -> None:
    row_map, rows = row_map_of(13, 1, 4, device), randn(13, 64, device=device).requires_grad_()
    weights = torch.full((13, 1), 3.0, device=device, requires_grad=True)
    unpermute_tokens(rows, row_map, weights).sum().backward()
    assert (rows.grad == 3).all()
    torch.testing.assert_close(weights.grad, rows.detach()[row_map.long()].sum(2))


def test_unpermute_without_weights_inverts_permute(device: torch.device) -> None:
    row_map, x = row_map_of(13, 1, 4, device), randn(13, 64, device=device).requires_grad_()
    d_out = randn(13, 64, seed=1, device=device)
    out, dx = output_and_grads(unpermute_tokens(permute_tokens_with_input(x, row_map)[0], row_map), d_out, x)
    assert torch.equal(out, x)
    assert torch.equal(dx, d_out)


def test_no_tokens(device: torch.device) -> None:
    row_map, ends = sort_by_expert(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    assert ends.tolist() == [0, 0, 0]
    x = torch.zeros(0, 16, device=device, requires_grad=True)
    weights = torch.zeros(0, 2, device=device, requires_grad=True)
    unpermute_tokens(permute_tokens_with_input(x, row_map)[0], row_map, weights, x).sum().backward()
    assert x.grad.shape == x.shape
    assert weights.grad.shape == weights.shape


def test_equal_inputs_give_equal_bits(device: torch.device) -> None:
    row_map, x = row_map_of(5, 2, 3, device), randn(5, 1100, device=device).requires_grad_()
    weights = randn(5, 2, seed=1, device=device).requires_grad_()
    d_out = randn(5, 1100, seed=2, device=device)
    runs = [
        output_and_grads(
            unpermute_tokens(permute_tokens_with_input(x, row_map)[0].sin(), row_map, weights), d_out, x, weights
        )
        for _ in range(2)
    ]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("implementation", ["reference"], indirect=True)  # kernels accumulate in fp32
def test_gradients_by_finite_differences() -> None:
    row_map = row_map_of(4, 3, 5, torch.device("cpu"))
    x, addend, weights = (
        randn(4, width, seed=seed, dtype=torch.float64).requires_grad_() for seed, width in enumerate((2, 2, 3))
    )

    def forward(x: Tensor, weights: Tensor, addend: Tensor) -> Tensor:
        rows, same_x = permute_tokens_with_input(x, row_map)
        return unpermute_tokens(rows.sin(), row_map, weights, addend) + same_x.cos()

    assert torch.autograd.gradcheck(forward, (x, weights, addend))
