"""Grouped 8-bit products on a real GPU: the bits of the CPU's casts, one kernel a product, and the host never waits."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from llmb.config.spec import Model, MoEConfig
from llmb.models.moe import MoE
from llmb.ops.moe.fp8_grouped_gemm import fp8_grouped_gemm, fp8_grouped_gemm_reference
from llmb.ops.quant.group_quant import (
    Fp8WeightCache,
    GroupedFp8,
    group_offsets,
    quantize_expert_weights,
    quantize_groups,
    quantize_groups_,
    weight_group_offsets,
)
from llmb.train.precision import Fp8GroupedLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="torch's grouped 8-bit products need Hopper",
    ),
]

GPU = torch.device("cuda", 0)
SIZES = {
    "even": [512, 512],
    "any": [1, 0, 700, 323],
    "nothing first and last": [0, 130, 0, 0, 71, 0],
    "64 small ones": [n % 37 for n in range(64)],
    "few rows for many": [3, 0, 0, 0, 0, 0, 0, 2],
}
MODEL = Model(
    name="small grok",
    architecture="grok1",
    layers=1,
    hidden=64,
    ffn=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=128,
    activation="gelu",
    experts=MoEConfig(count=8, top_k=2, ffn=128, renormalise=False),
)
WIDTHS = {"small": (512, 256), "narrow": (48, 80), "of DeepSeek-V3": (7168, 2048), "and back": (2048, 7168)}


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, device=GPU).cumsum(0).int()


def operands(sizes: list[int], inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(GPU).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=GPU, generator=generator)

    rows = sum(sizes)
    x = (normal(rows, inputs) * normal(rows, 1).exp()).bfloat16().requires_grad_()
    weight = (normal(len(sizes), outputs, inputs) * 0.02).requires_grad_()
    grad = (normal(rows, outputs) * normal(rows, 1).exp() * 1e-6).bfloat16()
    return x, weight, grad


def results(x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, **more) -> tuple[Tensor, Tensor, Tensor]:
    out = fp8_grouped_gemm(x, weight, ends, **more)
    return out, *torch.autograd.grad(out, (x, weight), grad)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def assert_same_bits(found: GroupedFp8, wanted: GroupedFp8, places: int | None = None) -> None:
    for name, ours, theirs in zip(wanted._fields, found, wanted, strict=True):
        if theirs.dtype != torch.float32:
            ours, theirs = (one[..., :places].contiguous().view(torch.uint8) for one in (ours, theirs))
        assert torch.equal(ours.cpu(), theirs.cpu()), name


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_the_casts_give_the_bits_of_plain_torch(sizes: list[int], source: torch.dtype) -> None:
    for width in (48, 512, 2048):
        x = operands(sizes, width, 16)[0].detach().to(source)
        groups = group_offsets(ends_of(sizes), len(x))
        made = quantize_groups(x, groups, rows=True, columns=True)
        wanted = GroupedFp8(*(torch.empty_like(one) for one in made))
        quantize_groups_.reference(x, groups, wanted)
        assert_same_bits(made, wanted, groups.padded_ends_E[-1].item())


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_a_weight_s_matrices_in_both_forms(source: torch.dtype) -> None:
    weight = operands([1, 1, 1], 1040, 336)[1].detach().to(source)
    made = quantize_expert_weights(weight, rows=True, columns=True)
    wanted = GroupedFp8(*(torch.empty_like(one) for one in made))
    quantize_groups_.reference(weight.flatten(0, 1), weight_group_offsets(weight), wanted)
    assert_same_bits(made, wanted)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("inputs", "outputs"), WIDTHS.values(), ids=WIDTHS)
def test_the_products_equal_their_reference(sizes: list[int], inputs: int, outputs: int) -> None:
    if len(sizes) == 64 and inputs > 512:
        inputs, outputs = inputs // 8, outputs // 8
    x, weight, grad = operands(sizes, inputs, outputs)
    found = results(x, weight, ends_of(sizes), grad)
    wanted = fp8_grouped_gemm_reference(x.detach(), weight.detach(), ends_of(sizes), grad)
    # The forward product adds with fewer bits.
    for name, ours, theirs, near in zip(
        ("out", "grad of x", "grad of weight"), found, wanted, (0.02, 0.006, 0.006), strict=True
    ):
        assert relative_error(ours, theirs) < near, name
    assert [(one == 0).all().item() for one in found[2]] == [size == 0 for size in sizes]


def test_fast_sums_of_the_way_back_lose_little() -> None:
    """Over 4,096 rows of an expert: less than the operands lose by their 8 bits, which is 0.03 and more."""
    sizes = [4096, 1024]
    x, weight, grad = operands(sizes, 1024, 2048)
    exact, fast = (results(x, weight, ends_of(sizes), grad, fp8_fast_accum=fast) for fast in (False, True))
    assert torch.equal(exact[0], fast[0])
    for ours, theirs in zip(fast[1:], exact[1:], strict=True):
        assert 0 < relative_error(ours, theirs) < 0.02


def test_the_error_is_that_of_rounded_operands() -> None:
    sizes = [2048, 2048]
    x, weight, grad = operands(sizes, 6144, 4096)
    spans = (slice(2048), slice(2048, None))
    exact, slope, matrices = x.detach().float(), grad.float(), weight.detach()
    truth = (
        torch.cat([exact[rows] @ matrix.T for rows, matrix in zip(spans, matrices, strict=True)]),
        torch.cat([slope[rows] @ matrix for rows, matrix in zip(spans, matrices, strict=True)]),
        torch.stack([slope[rows].T @ exact[rows] for rows in spans]),
    )
    for ours, theirs in zip(results(x, weight, ends_of(sizes), grad), truth, strict=True):
        assert 0.005 < relative_error(ours, theirs) < math.sqrt(2 / 3) * 2.0**-4


def test_each_product_is_one_kernel_of_the_hardware() -> None:
    x, weight, grad = operands([100, 0, 156], 512, 256)
    results(x, weight, ends_of([100, 0, 156]), grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results(x, weight, ends_of([100, 0, 156]), grad)
    calls = Counter({event.key: event.count for event in profile.key_averages()})
    assert calls["aten::_scaled_grouped_mm"] == 3
    assert calls["aten::mm"] == calls["aten::_scaled_mm"] == calls["aten::_grouped_mm"] == 0


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_what_is_not_a_number_reaches_all_that_it_touches(lost: float) -> None:
    x, weight, grad = operands([20, 44], 128, 64)
    x.data[3, 5] = lost
    out, _, grad_weight = results(x, weight, ends_of([20, 44]), grad)
    assert out[3].isnan().all()
    assert out.isnan().sum() == 64
    assert grad_weight[0, :, 5].isnan().all()
    assert grad_weight.isnan().sum() == 64


@contextmanager
def never_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [str(one.message) for one in caught if "synchronizing" in str(one.message)]


@pytest.mark.parametrize("keeps", [True, False])
def test_experts_never_wait_for_the_device(keeps: bool) -> None:
    with GPU:
        block = MoE(MODEL)
    for layer in (block.gate, block.up, block.down):
        layer.__class__ = Fp8GroupedLinear
        layer.fp8_cache = Fp8WeightCache() if keeps else None
    for parameter in block.parameters():
        parameter.data.normal_(0.0, 0.02)
    x = torch.randn(2, 300, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    block(x).sum().backward()
    with never_waiting():
        for _ in range(2):
            block(x).sum().backward()
            with torch.no_grad():
                torch._foreach_mul_([block.gate.weight, block.up.weight, block.down.weight], 1.5)


def test_a_replayed_graph_sees_other_rows_other_groups_and_other_weights() -> None:
    x, weight, grad = operands([300, 0, 212], 512, 256)
    ends, kept = ends_of([300, 0, 212]), Fp8WeightCache()
    results(x, weight, ends, grad, weight_cache=kept)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(x, weight, ends, grad, weight_cache=kept)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = results(x, weight, ends, grad, weight_cache=kept)
    with torch.no_grad():
        x.copy_(x.flip(0))
        ends.copy_(ends_of([17, 400, 95]))
        weight.mul_(-3.0)
    graph.replay()
    again = [one.clone() for one in found]
    for name, ours, theirs in zip(
        ("out", "grad of x", "grad of weight"), again, results(x, weight, ends.clone(), grad), strict=True
    ):
        assert torch.equal(ours, theirs), name
