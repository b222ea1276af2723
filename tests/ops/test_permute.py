"""Permutation of tokens to experts and back, plain and by the kernels, against a loop over tokens in fp64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import llmb.ops.moe.permute as permute_module
from llmb.ops.moe.permute import permute_tokens, permute_tokens_with_input, unpermute_tokens

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
TOLERANCES = {FP64: 1e-13, FP32: 1e-5, BF16: 2**-7}  # the interpreter truncates bf16


class Case(NamedTuple):
    tokens: int
    top_k: int
    experts: int
    channels: int


CASES = {
    "one expert per token": Case(13, 1, 4, 64),
    "eight experts per token": Case(37, 8, 16, 96),
    "an odd width": Case(11, 3, 5, 53),
    "wider than a block": Case(5, 2, 3, 1100),
    "one token": Case(1, 4, 9, 32),
    "one channel": Case(6, 2, 2, 1),
}


@pytest.fixture(params=["plain", "kernels"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with plain torch and once with the Triton kernels, interpreted where there is no GPU."""
    for name in ("sort_by_expert", "permute", "unpermute", "unpermute_backward"):
        op = getattr(permute_module, name)
        monkeypatch.setattr(permute_module, name, op.triton if request.param == "kernels" else op.reference)


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=FP64).to(dtype)


def topk_ids_of(case: Case, seed: int = 0) -> Tensor:
    """No token is routed to an expert twice; where there are others, nobody is routed to the last one."""
    likely = torch.arange(case.experts, 0, -1.0).square()
    if case.top_k < case.experts:
        likely[-1] = 0
    return likely.expand(case.tokens, -1).multinomial(case.top_k, generator=torch.Generator().manual_seed(seed))


def row_map_of(case: Case, device: torch.device) -> Tensor:
    return permute_module.sort_by_expert(topk_ids_of(case).to(device), case.experts)[0]


def output_and_grads(out: Tensor, d_out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def assert_rounded(actual: list[Tensor], expected: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    """Compare each number by itself, relative to the sum of the magnitudes that it is the sum of."""
    for tensor, (exact, magnitude) in zip(actual, expected, strict=True):
        assert tensor.shape == exact.shape
        error = (tensor.double().cpu() - exact).abs()
        assert (error <= TOLERANCES[FP32 if tensor.dtype == FP32 else dtype] * magnitude + 1e-30).all()


def exact_and_magnitude(function, *inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Evaluate a function of products and sums on the numbers and on their magnitudes."""
    exact = [tensor.detach().double().cpu() for tensor in inputs]
    return list(zip(function(*exact), function(*(tensor.abs() for tensor in exact)), strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("shape", "experts"), [((33, 3), 7), ((1, 1), 1), ((128, 1), 3), ((300, 2), 5), ((129,), 2), ((50, 8), 256)]
)
def test_sort_by_expert_is_stable(
    device: torch.device, shape: tuple[int, ...], experts: int, dtype: torch.dtype
) -> None:
    likely = max(experts - 2, 1)  # nobody is routed to the last
    topk_ids = torch.randint(likely, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    row_map, ends = permute_module.sort_by_expert(topk_ids.to(device), experts)
    assert row_map.shape == topk_ids.shape
    assert row_map.dtype == ends.dtype == torch.int32
    order = sorted(range(topk_ids.numel()), key=lambda pair: (topk_ids.flatten()[pair].item(), pair))
    assert row_map.flatten()[order].tolist() == list(range(topk_ids.numel()))
    assert ends.tolist() == topk_ids.flatten().bincount(minlength=experts).cumsum(0).tolist()


@pytest.mark.parametrize("expert", [0, 3])
def test_sort_with_all_tokens_routed_to_one_expert(device: torch.device, expert: int) -> None:
    row_map, ends = permute_module.sort_by_expert(torch.full((150, 2), expert, device=device), 4)
    assert torch.equal(row_map.cpu(), torch.arange(300, dtype=torch.int32).view(150, 2))
    assert ends.tolist() == [0] * expert + [300] * (4 - expert)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_permute_forward_and_backward(device: torch.device, case: Case, dtype: torch.dtype) -> None:
    row_map = row_map_of(case, device)
    x = random_tensor(case.tokens, case.channels, dtype=dtype).to(device).requires_grad_()
    drows = random_tensor(row_map.numel(), case.channels, seed=1, dtype=dtype).to(device)
    rows, dx = output_and_grads(permute_tokens(x, row_map), drows, x)
    assert rows.dtype == dx.dtype == dtype
    for token, token_rows in enumerate(row_map.tolist()):
        assert all(torch.equal(rows[row], x[token]) for row in token_rows)
    assert_rounded([dx], exact_and_magnitude(lambda d: [d[row_map.cpu().long()].sum(1)], drows), dtype)


def test_permute_with_input_adds_the_gradient_of_the_input(device: torch.device) -> None:
    case = CASES["eight experts per token"]
    row_map, x = row_map_of(case, device), random_tensor(37, 96).to(device).requires_grad_()
    drows, d_input = random_tensor(296, 96, seed=1).to(device), random_tensor(37, 96, seed=2).to(device)
    rows, same_x = permute_tokens_with_input(x, row_map)
    assert torch.equal(same_x, x)
    (dx,) = torch.autograd.grad((rows, same_x), x, (drows, d_input), retain_graph=True)
    expected = exact_and_magnitude(lambda d, s: [d[row_map.cpu().long()].sum(1) + s], drows, d_input)
    assert_rounded([dx], expected, FP32)
    assert torch.equal(torch.autograd.grad(same_x, x, d_input)[0], d_input)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("with_addend", [False, True], ids=["sum", "sum with addend"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_unpermute_forward_and_backward(
    device: torch.device, case: Case, with_addend: bool, dtype: torch.dtype
) -> None:
    row_map = row_map_of(case, device)
    rows = random_tensor(row_map.numel(), case.channels, dtype=dtype).to(device).requires_grad_()
    weights = random_tensor(*row_map.shape, seed=1).abs().to(device).requires_grad_()
    addend = random_tensor(case.tokens, case.channels, seed=2, dtype=dtype).to(device).requires_grad_()
    d_out = random_tensor(case.tokens, case.channels, seed=3, dtype=dtype).to(device)
    inputs = (rows, weights, addend) if with_addend else (rows, weights)
    out = unpermute_tokens(rows, row_map, weights, addend if with_addend else None)
    actual = output_and_grads(out, d_out, *inputs)
    assert [tensor.dtype for tensor in actual] == [dtype, dtype, FP32, dtype][: len(actual)]

    def exact(rows: Tensor, weights: Tensor, addend: Tensor, d_out: Tensor) -> list[Tensor]:
        index = row_map.cpu().long()
        drows = torch.zeros_like(rows).index_put((index,), d_out[:, None] * weights[:, :, None])
        out = (rows[index] * weights[:, :, None]).sum(1)
        dweights = (rows[index] * d_out[:, None]).sum(2)
        return [out + addend, drows, dweights, d_out] if with_addend else [out, drows, dweights]

    assert_rounded(actual, exact_and_magnitude(exact, rows, weights, addend, d_out), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e30])
def test_unpermute_of_zeros_and_large_numbers(device: torch.device, scale: float) -> None:
    case = CASES["eight experts per token"]
    row_map = row_map_of(case, device)
    rows = (random_tensor(row_map.numel(), 96, dtype=BF16) * scale).to(device).requires_grad_()
    weights = torch.full(row_map.shape, 0.125, device=device, requires_grad=True)
    out, drows, dweights = output_and_grads(
        unpermute_tokens(rows, row_map, weights), torch.ones(37, 96, device=device, dtype=BF16), *(rows, weights)
    )
    exact = rows.detach().double()[row_map.long()]
    assert (drows == 0.125).all()
    for actual, expected in ((out, exact.mean(1)), (dweights, exact.sum(2))):
        assert (actual.double() - expected).norm() <= 2**-7 * expected.norm()


def test_unpermute_backward_of_an_expanded_gradient(device: torch.device) -> None:
    case = CASES["one expert per token"]
    row_map, rows = row_map_of(case, device), random_tensor(13, 64).to(device).requires_grad_()
    weights = torch.full((13, 1), 3.0, device=device, requires_grad=True)
    unpermute_tokens(rows, row_map, weights).sum().backward()
    assert (rows.grad == 3).all()
    torch.testing.assert_close(weights.grad, rows.detach()[row_map.long()].sum(2))


def test_unpermute_without_weights_inverts_permute(device: torch.device) -> None:
    case = CASES["one expert per token"]
    row_map, x = row_map_of(case, device), random_tensor(13, 64).to(device).requires_grad_()
    d_out = random_tensor(13, 64, seed=1).to(device)
    out, dx = output_and_grads(unpermute_tokens(permute_tokens(x, row_map), row_map), d_out, x)
    assert torch.equal(out, x)
    assert torch.equal(dx, d_out)


def test_no_tokens(device: torch.device) -> None:
    row_map, ends = permute_module.sort_by_expert(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    assert ends.tolist() == [0, 0, 0]
    x = torch.zeros(0, 16, device=device, requires_grad=True)
    weights = torch.zeros(0, 2, device=device, requires_grad=True)
    unpermute_tokens(permute_tokens(x, row_map), row_map, weights, x).sum().backward()
    assert x.grad.shape == x.shape
    assert weights.grad.shape == weights.shape


def test_equal_inputs_give_equal_bits(device: torch.device) -> None:
    case = CASES["wider than a block"]
    row_map, x = row_map_of(case, device), random_tensor(5, 1100).to(device).requires_grad_()
    weights = random_tensor(5, 2, seed=1).to(device).requires_grad_()
    d_out = random_tensor(5, 1100, seed=2).to(device)
    runs = [
        output_and_grads(unpermute_tokens(permute_tokens(x, row_map).sin(), row_map, weights), d_out, x, weights)
        for _ in range(2)
    ]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("implementation", ["plain"], indirect=True)  # kernels accumulate in fp32
def test_gradients_by_finite_differences() -> None:
    case = Case(4, 3, 5, 2)
    row_map = row_map_of(case, torch.device("cpu"))
    x, addend = (random_tensor(4, 2, seed=seed, dtype=FP64).requires_grad_() for seed in range(2))
    weights = random_tensor(4, 3, dtype=FP64).requires_grad_()

    def forward(x: Tensor, weights: Tensor, addend: Tensor) -> Tensor:
        rows, same_x = permute_tokens_with_input(x, row_map)
        return unpermute_tokens(rows.sin(), row_map, weights, addend) + same_x.cos()

    assert torch.autograd.gradcheck(forward, (x, weights, addend))
