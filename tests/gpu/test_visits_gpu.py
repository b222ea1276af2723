"""Visits to experts on a real GPU, at the sizes of DeepSeek and Grok: each kernel against plain torch in double."""

import pytest
import torch
from torch import Tensor

from llmb.ops.moe.permute import (
    permute,
    permute_tokens,
    permute_tokens_with_input,
    sort_by_expert,
    unpermute,
    unpermute_backward,
    unpermute_tokens,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

GPU = torch.device("cuda", 0)
BF16, FP32 = torch.bfloat16, torch.float32
ROUNDED = {BF16: 0.003, FP32: 1e-6}  # relative error of rounding once
SIZES = {  # tokens, visits of each, experts, channels
    "deepseek": (1025, 8, 256, 7168),
    "grok": (515, 2, 8, 6144),
    "one visit": (300, 1, 4, 4096),
    "one token": (1, 8, 16, 7168),
    "odd": (77, 3, 5, 1001),
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)).to(dtype)


def chosen_of(tokens: int, visits: int, experts: int) -> Tensor:
    """Uneven, and no token visits one twice."""
    likely = torch.arange(experts, 0, -1.0, device=GPU).expand(tokens, -1)
    return likely.multinomial(visits, generator=torch.Generator(GPU).manual_seed(1))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize(("tokens", "visits", "experts"), [(65536, 8, 256), (8192, 2, 8), (4099, 1, 32), (1, 8, 256)])
def test_visits_are_sorted_as_by_torch(tokens: int, visits: int, experts: int) -> None:
    chosen = chosen_of(tokens, visits, experts)
    for found, wanted in zip(
        sort_by_expert(chosen, experts), sort_by_expert.reference(chosen, experts), strict=True
    ):
        assert found.dtype == torch.int32
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_copies_there_and_back(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, visits, experts, channels = sizes
    places, _ = sort_by_expert(chosen_of(tokens, visits, experts), experts)
    x = drawn(tokens, channels, dtype=dtype).requires_grad_()
    drows = drawn(tokens * visits, channels, seed=1, dtype=dtype)
    dstream = drawn(tokens, channels, seed=2, dtype=dtype)
    rows, stream = permute_tokens_with_input(x, places)
    assert torch.equal(rows, permute.reference(x.detach(), places))
    (alone,) = torch.autograd.grad(rows, x, drows, retain_graph=True)
    (both,) = torch.autograd.grad((rows, stream), x, (drows, dstream))
    exact = unpermute.reference(drows.double(), places, None, None)
    assert relative_error(alone, exact) < ROUNDED[dtype]
    assert relative_error(both, exact + dstream) < ROUNDED[dtype]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_weighted_sums_there_and_back(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, visits, experts, channels = sizes
    places, _ = sort_by_expert(chosen_of(tokens, visits, experts), experts)
    rows = drawn(tokens * visits, channels, dtype=dtype).requires_grad_()
    weights = drawn(tokens, visits, seed=1, dtype=FP32).requires_grad_()
    beside, dout = (drawn(tokens, channels, seed=seed, dtype=dtype) for seed in (2, 3))
    beside.requires_grad_()
    results = []
    for _ in range(2):
        out = unpermute_tokens(rows, places, weights, beside)
        results.append((out, *torch.autograd.grad(out, (rows, weights, beside), dout)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    out, drows, dweights, dbeside = results[0]
    doubles = [one.detach().double() for one in (rows, weights, beside, dout)]
    exact_drows, exact_dweights = unpermute_backward.reference(doubles[3], doubles[0], places, doubles[1])
    assert relative_error(out, unpermute.reference(doubles[0], places, *doubles[1:3])) < ROUNDED[dtype]
    assert relative_error(drows, exact_drows) < ROUNDED[dtype]
    assert relative_error(dweights, exact_dweights) < 1e-5
    assert torch.equal(dbeside, dout)


def test_nothing_of_all_visits_is_made_besides_the_slope_of_their_rows() -> None:
    tokens, visits, experts, channels = SIZES["deepseek"]
    places, _ = sort_by_expert(chosen_of(tokens, visits, experts), experts)
    x = drawn(tokens, channels).requires_grad_()
    weights = drawn(tokens, visits, dtype=FP32).requires_grad_()
    dout = drawn(tokens, channels, seed=1)
    rows = permute_tokens(x, places)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    unpermute_tokens(rows, places, weights).backward(dout)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < (tokens * visits + 4 * tokens) * channels * BF16.itemsize
