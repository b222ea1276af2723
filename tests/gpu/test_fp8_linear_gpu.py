"""fp8 linear layers on a GPU: the GEMMs have the error of fp8 operands, and are fp8 kernels."""

import math
from collections import Counter

import pytest
import torch
from cuda_checks import GPU, NEEDS_FP8_GEMM, randn, relative_error
from torch import Tensor

from llmb.ops.gemm.fp8_linear import OperandNames, fp8_linear, fp8_linear_reference
from llmb.ops.quant.delayed_scaling import CurrentScaling, DelayedScaling, Scaling

pytestmark = NEEDS_FP8_GEMM

TOKENS = 2048
NAMES = OperandNames("x", "weight", "dy")
LAYERS_OF_8B = [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)]  # inputs, outputs: q and o, k and v, up, down


def operands(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = randn(tokens, inputs), randn(outputs, inputs, seed=1, dtype=torch.float32) * 0.02
    return x.requires_grad_(), weight.requires_grad_(), randn(tokens, outputs, seed=2) * 1e-6


def results(x: Tensor, weight: Tensor, grad: Tensor, scaling: Scaling | None = None) -> tuple[Tensor, ...]:
    scaling = scaling or CurrentScaling(NAMES.dtypes, GPU)
    out = fp8_linear(x, weight, scaling, NAMES)
    return out, *torch.autograd.grad(out, (x, weight), grad)


@pytest.mark.parametrize(("inputs", "outputs"), LAYERS_OF_8B, ids=str)
def test_gemms_of_8b(inputs: int, outputs: int) -> None:
    x, weight, grad = operands(TOKENS, inputs, outputs)
    actual = results(x, weight, grad)
    exact = (x.float() @ weight.T, grad.float() @ weight, grad.float().T @ x.float())
    same = fp8_linear_reference(x.detach(), weight.detach(), grad)
    forward, backward = (math.hypot(2.0**-bits, 2.0**-4) / math.sqrt(3) for bits in (4, 3))
    # Fast accumulation in the forward pass shows against the reference, much less against exact numbers.
    for name, a, truth, reference, bound, near in zip(
        ("out", "grad of x", "grad of weight"), actual, exact, same,
        (forward, backward, backward), (0.02, 0.005, 0.005), strict=True,
    ):  # fmt: skip
        assert relative_error(a, reference) < near, name
        assert 0.005 < relative_error(a, truth) < bound, name


def test_delayed_scaling_takes_the_scales_of_the_previous_step() -> None:
    """The second step takes the scales of the first; gradients accumulate in place."""
    scaling = DelayedScaling(NAMES.dtypes, GPU)
    x, weight, grad = operands(TOKENS, 4096, 1024)
    first = results(x, weight, grad, scaling)
    scaling.update()
    scales = tuple(scaling.state_dict()[name][0] for name in NAMES)
    expected = fp8_linear_reference(x.detach(), weight.detach(), grad, scales)
    for a, b, second, near in zip(
        first, expected, results(x, weight, grad, scaling), (0.02, 0.005, 0.005), strict=True
    ):
        assert torch.equal(a, second)
        assert relative_error(a, b) < near
    weight.main_grad = torch.full_like(weight, math.nan)
    for _micro_batch in range(2):
        fp8_linear(x, weight, scaling, NAMES).backward(grad)
    assert weight.grad.data_ptr() == weight.main_grad.data_ptr()
    assert relative_error(weight.grad, 2 * first[2]) < 1e-5


def test_all_three_gemms_use_fp8_kernels() -> None:
    x, weight, grad = operands(2048, 2048, 3072)
    results(x, weight, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results(x, weight, grad)
    calls = Counter({event.key: event.count for event in profile.key_averages()})
    assert calls["llmb::matmul"] == 3
    assert calls["aten::mm"] == calls["aten::linear"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
def test_nonfinite_values_become_nan(value: float, where: str) -> None:
    named = dict(zip(("x", "weight", "grad"), operands(64, 128, 64), strict=True))
    named[where].data[3, 5] = value
    out, grad_x, grad_weight = results(**named)
    touched = {"x": (out, grad_weight), "weight": (out, grad_x), "grad": (grad_x, grad_weight)}[where]
    assert all(t.isnan().all() for t in touched)
