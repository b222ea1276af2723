"""Grouped fp8 GEMM on a GPU: the numbers of the reference, one kernel per GEMM, no synchronization, graphs."""

import math
from collections import Counter

import pytest
import torch
from cuda_checks import GPU, no_synchronization, relative_error
from small_models import grok1_model
from torch import Tensor

from llmb.config.model import MoEConfig
from llmb.models.moe import MoE
from llmb.ops.moe.fp8_grouped_gemm import fp8_grouped_gemm, fp8_grouped_gemm_reference
from llmb.ops.quant.group_quant import Fp8WeightCache
from llmb.train.module_class import use_class
from llmb.train.precision import Fp8GroupedLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="torch's grouped fp8 GEMM needs Hopper",
    ),
]

SIZES = {
    "even": [512, 512],
    "any": [1, 0, 700, 323],
    "empty first and last": [0, 130, 0, 0, 71, 0],
    "64 small groups": [n % 37 for n in range(64)],
    "mostly empty": [3, 0, 0, 0, 0, 0, 0, 2],
}
MODEL = grok1_model(hidden=64, ffn=128, experts=MoEConfig(count=8, top_k=2, ffn=128, renormalise=False))
WIDTHS = {"small": (512, 256), "narrow": (48, 80), "DeepSeek-V3 up": (7168, 2048), "DeepSeek-V3 down": (2048, 7168)}


def group_ends(sizes: list[int]) -> Tensor:
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


def results(x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    out = fp8_grouped_gemm(x, weight, ends, **options)
    return out, *torch.autograd.grad(out, (x, weight), grad)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("inputs", "outputs"), WIDTHS.values(), ids=WIDTHS)
def test_gemms_match_the_reference(sizes: list[int], inputs: int, outputs: int) -> None:
    if len(sizes) == 64 and inputs > 512:
        inputs, outputs = inputs // 8, outputs // 8
    x, weight, grad = operands(sizes, inputs, outputs)
    actual = results(x, weight, group_ends(sizes), grad)
    expected = fp8_grouped_gemm_reference(x.detach(), weight.detach(), group_ends(sizes), grad)
    # The forward pass uses fast accumulation.
    for name, a, b, near in zip(
        ("out", "grad of x", "grad of weight"), actual, expected, (0.02, 0.006, 0.006), strict=True
    ):
        assert relative_error(a, b) < near, name
    assert [(x == 0).all().item() for x in actual[2]] == [size == 0 for size in sizes]


def test_fast_accumulation_in_the_backward_pass_loses_little() -> None:
    """Over 4,096 rows of an expert, less than rounding the operands to fp8 loses (0.03 and more)."""
    sizes = [4096, 1024]
    x, weight, grad = operands(sizes, 1024, 2048)
    exact, fast = (results(x, weight, group_ends(sizes), grad, fp8_fast_accum=fast) for fast in (False, True))
    assert torch.equal(exact[0], fast[0])
    for a, b in zip(fast[1:], exact[1:], strict=True):
        assert 0 < relative_error(a, b) < 0.02


def test_each_gemm_is_one_kernel() -> None:
    x, weight, grad = operands([100, 0, 156], 512, 256)
    results(x, weight, group_ends([100, 0, 156]), grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results(x, weight, group_ends([100, 0, 156]), grad)
    calls = Counter({event.key: event.count for event in profile.key_averages()})
    assert calls["aten::_scaled_grouped_mm"] == 3
    assert calls["aten::mm"] == calls["aten::_scaled_mm"] == calls["aten::_grouped_mm"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_values_reach_their_row_and_column_only(value: float) -> None:
    x, weight, grad = operands([20, 44], 128, 64)
    x.data[3, 5] = value
    out, _, grad_weight = results(x, weight, group_ends([20, 44]), grad)
    assert out[3].isnan().all()
    assert out.isnan().sum() == 64
    assert grad_weight[0, :, 5].isnan().all()
    assert grad_weight.isnan().sum() == 64


@pytest.mark.parametrize("has_cache", [True, False])
def test_fp8_experts_never_synchronize(has_cache: bool) -> None:
    with GPU:
        block = MoE(MODEL)
    for layer in (block.gate, block.up, block.down):
        use_class(layer, Fp8GroupedLinear, fp8_cache=Fp8WeightCache() if has_cache else None)
    for parameter in block.parameters():
        parameter.data.normal_(0.0, 0.02)
    x = torch.randn(2, 300, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    block(x).sum().backward()
    with no_synchronization():
        for _ in range(2):
            block(x).sum().backward()
            with torch.no_grad():
                torch._foreach_mul_([block.gate.weight, block.up.weight, block.down.weight], 1.5)


def test_a_replayed_graph_reads_new_rows_groups_and_weights() -> None:
    x, weight, grad = operands([300, 0, 212], 512, 256)
    ends, cache = group_ends([300, 0, 212]), Fp8WeightCache()
    results(x, weight, ends, grad, weight_cache=cache)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(x, weight, ends, grad, weight_cache=cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        actual = results(x, weight, ends, grad, weight_cache=cache)
    with torch.no_grad():
        x.copy_(x.flip(0))
        ends.copy_(group_ends([17, 400, 95]))
        weight.mul_(-3.0)
    graph.replay()
    replayed = [x.clone() for x in actual]
    for name, a, b in zip(
        ("out", "grad of x", "grad of weight"), replayed, results(x, weight, ends.clone(), grad), strict=True
    ):
        assert torch.equal(a, b), name
