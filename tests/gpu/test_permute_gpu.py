"""MoE permute and unpermute on a GPU, at the sizes of DeepSeek and Grok, against references in double."""

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
SIZES = {  # tokens, top_k, experts, channels
    "deepseek": (1025, 8, 256, 7168),
    "grok": (515, 2, 8, 6144),
    "top 1": (300, 1, 4, 4096),
    "one token": (1, 8, 16, 7168),
    "odd": (77, 3, 5, 1001),
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)).to(dtype)


def random_topk_ids(tokens: int, top_k: int, experts: int) -> Tensor:
    """Return uneven routing; no token selects an expert twice."""
    likely = torch.arange(experts, 0, -1.0, device=GPU).expand(tokens, -1)
    return likely.multinomial(top_k, generator=torch.Generator(GPU).manual_seed(1))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(65536, 8, 256), (8192, 2, 8), (4099, 1, 32), (1, 8, 256)])
def test_sort_by_expert_matches_torch(tokens: int, top_k: int, experts: int) -> None:
    topk_ids = random_topk_ids(tokens, top_k, experts)
    for actual, expected in zip(
        sort_by_expert(topk_ids, experts), sort_by_expert.reference(topk_ids, experts), strict=True
    ):
        assert actual.dtype == torch.int32
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_permute_tokens_forward_and_backward(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, top_k, experts, channels = sizes
    row_map, _ = sort_by_expert(random_topk_ids(tokens, top_k, experts), experts)
    x = randn(tokens, channels, dtype=dtype).requires_grad_()
    drows = randn(tokens * top_k, channels, seed=1, dtype=dtype)
    d_residual = randn(tokens, channels, seed=2, dtype=dtype)
    rows, residual = permute_tokens_with_input(x, row_map)
    assert torch.equal(rows, permute.reference(x.detach(), row_map, row_map.numel()))
    (dx,) = torch.autograd.grad(rows, x, drows, retain_graph=True)
    (dx_with_residual,) = torch.autograd.grad((rows, residual), x, (drows, d_residual))
    exact = unpermute.reference(drows.double(), row_map, None, None)
    assert relative_error(dx, exact) < ROUNDED[dtype]
    assert relative_error(dx_with_residual, exact + d_residual) < ROUNDED[dtype]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_unpermute_tokens_forward_and_backward(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, top_k, experts, channels = sizes
    row_map, _ = sort_by_expert(random_topk_ids(tokens, top_k, experts), experts)
    rows = randn(tokens * top_k, channels, dtype=dtype).requires_grad_()
    weights = randn(tokens, top_k, seed=1, dtype=FP32).requires_grad_()
    addend, dout = (randn(tokens, channels, seed=seed, dtype=dtype) for seed in (2, 3))
    addend.requires_grad_()
    results = []
    for _ in range(2):
        out = unpermute_tokens(rows, row_map, weights, addend)
        results.append((out, *torch.autograd.grad(out, (rows, weights, addend), dout)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    out, drows, dweights, daddend = results[0]
    doubles = [x.detach().double() for x in (rows, weights, addend, dout)]
    exact_drows, exact_dweights = unpermute_backward.reference(doubles[3], doubles[0], row_map, doubles[1])
    assert relative_error(out, unpermute.reference(doubles[0], row_map, *doubles[1:3])) < ROUNDED[dtype]
    assert relative_error(drows, exact_drows) < ROUNDED[dtype]
    assert relative_error(dweights, exact_dweights) < 1e-5
    assert torch.equal(daddend, dout)


def test_unpermute_backward_allocates_the_gradient_of_rows_only() -> None:
    tokens, top_k, experts, channels = SIZES["deepseek"]
    row_map, _ = sort_by_expert(random_topk_ids(tokens, top_k, experts), experts)
    x = randn(tokens, channels).requires_grad_()
    weights = randn(tokens, top_k, dtype=FP32).requires_grad_()
    dout = randn(tokens, channels, seed=1)
    rows = permute_tokens(x, row_map)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    unpermute_tokens(rows, row_map, weights).backward(dout)
    peak_bytes = torch.cuda.max_memory_allocated() - before
    assert peak_bytes < (tokens * top_k + 4 * tokens) * channels * BF16.itemsize
