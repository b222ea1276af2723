"""fp8 linear layers, emulated on a CPU: the numbers of the plain reference, and the error of the dtypes."""

import math
from collections import Counter

import pytest
import torch
from seeded_tensors import relative_error
from torch import Tensor

from llmb.ops.gemm.fp8_linear import OperandNames, activation_to_fp8, fits_fp8, fp8_linear, fp8_linear_reference
from llmb.ops.quant.activation_quant import E4M3, MIN_AMAX
from llmb.ops.quant.delayed_scaling import MARGIN, CurrentScaling, DelayedScaling, Scaling
from llmb.ops.quant.fp8_quant import E5M2, cast_to_fp8, tensor_scale

CPU = torch.device("cpu")
NAMES = OperandNames("x", "weight", "dy")
CURRENT = CurrentScaling(NAMES.dtypes, CPU)
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="no GPU of compute capability 8.9")
SHAPES = [(16, 16, 16), (64, 32, 48), (128, 256, 64), (48, 512, 1024)]  # tokens, inputs, outputs
LAYERS_OF_8B = [  # q and o, k and v, up, down
    pytest.param((2048, *sizes), marks=[pytest.mark.gpu, needs_fp8])
    for sizes in ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
]
# Half a step between neighbours, relative to the number: 2^-4 with 3 mantissa bits, 2^-3 with 2.
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}


def operands(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + inputs)
    x = torch.randn(tokens, inputs, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(outputs, inputs, generator=generator) * 0.02).to(device).requires_grad_()
    grad = (torch.randn(tokens, outputs, generator=generator) * 1e-6).to(device, dtype)
    return x, weight, grad


def delayed(device: torch.device = CPU) -> DelayedScaling:
    return DelayedScaling(NAMES.dtypes, device)


def results(x: Tensor, weight: Tensor, grad: Tensor, scaling: Scaling | None = None) -> tuple[Tensor, Tensor, Tensor]:
    out = fp8_linear(x, weight, scaling or CurrentScaling(NAMES.dtypes, x.device), NAMES)
    return out, *torch.autograd.grad(out, (x, weight), grad)


def assert_reference(actual: tuple[Tensor, ...], x: Tensor, weight: Tensor, grad: Tensor, *scales: object) -> None:
    expected = fp8_linear_reference(x.detach(), weight.detach(), grad, *scales)
    near = (0.02, 0.005, 0.005)  # fast accumulation in the forward pass of a GPU
    for name, a, b, bound in zip(("out", "grad of x", "grad of weight"), actual, expected, near, strict=True):
        if a.is_cuda:
            assert relative_error(a, b) < bound, name
        else:
            # Operands in another layout may be summed in another order, which BLAS chooses by machine and threads.
            assert torch.equal(a, b) or (a.dtype == torch.float32 and relative_error(a, b) < 1e-7), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_emulation_equals_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, grad = operands(*shape, dtype=dtype)
    actual = results(x, weight, grad)
    assert [x.dtype for x in actual] == [dtype, dtype, torch.float32]
    assert_reference(actual, x, weight, grad)


@pytest.mark.parametrize("shape", [*SHAPES[1:], *LAYERS_OF_8B], ids=str)
def test_error_is_that_of_rounded_operands(shape: tuple[int, int, int], device: torch.device) -> None:
    """Two operands, each off by at most half a step, uniformly: a third of its square each, independent."""
    x, weight, grad = operands(*shape, device=device)
    exact = (x.float() @ weight.T, grad.float() @ weight, grad.float().T @ x.float())
    bounds = [math.hypot(HALF_STEP[a], HALF_STEP[b]) for a, b in ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3))]
    actual = results(x, weight, grad)
    for tensor, expected, bound in zip(actual, exact, bounds, strict=True):
        assert 0.005 < relative_error(tensor, expected) < bound / math.sqrt(3)
    assert_reference(actual, x, weight, grad)


@pytest.mark.gpu
@needs_fp8
def test_all_three_gemms_use_fp8_kernels(device: torch.device) -> None:
    tensors = operands(2048, 2048, 3072, device=device)
    results(*tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results(*tensors)
    calls = Counter({event.key: event.count for event in profile.key_averages()})
    assert calls["llmb::matmul"] == 3
    assert calls["aten::mm"] == calls["aten::linear"] == 0


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("magnitude", [1e-36, 1e-20, 1.0, 3e4, 1e30, 1e38])
def test_each_value_is_off_by_half_a_step_at_most(dtype: torch.dtype, magnitude: float) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * magnitude
    quantized = cast_to_fp8(x, tensor_scale(x, dtype), dtype, rows=True, columns=True)
    if magnitude > MIN_AMAX:
        assert quantized.rows.float().abs().max() == torch.finfo(dtype).max, (
            "the largest magnitude uses the whole range"
        )
    assert torch.equal(quantized.columns.float(), quantized.rows.float().T)
    dequantized = quantized.rows.double() * quantized.scale.double()
    smallest_step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * quantized.scale.double()
    allowed = torch.maximum(x.double().abs() * HALF_STEP[dtype], smallest_step / 2) * (1 + 1e-6)
    assert ((dequantized - x.double()).abs() <= allowed).all()


@pytest.mark.parametrize("factor", [1e-25, 1e-12, 1e12, 1e25])
def test_result_is_invariant_to_magnitude(factor: float) -> None:
    """The nearest power of two passes through the scales exactly."""
    factor = 2.0 ** round(math.log2(factor))
    x, weight, grad = operands(32, 64, 32)
    plain = results(x, weight, grad)
    scaled = results((x.detach() * factor).requires_grad_(), weight, grad)
    assert torch.equal(scaled[0], plain[0] * factor)
    assert torch.equal(scaled[1], plain[1])
    assert torch.equal(scaled[2], plain[2] * factor)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
def test_nonfinite_values_become_nan(value: float, where: str, device: torch.device) -> None:
    named = dict(zip(("x", "weight", "grad"), operands(64, 128, 64, device=device), strict=True))
    named[where].data[3, 5] = value
    out, grad_x, grad_weight = results(**named)
    touched = {"x": (out, grad_weight), "weight": (out, grad_x), "grad": (grad_x, grad_weight)}[where]
    assert all(t.isnan().all() for t in touched)


def test_fits_fp8() -> None:
    assert fits_fp8(16, 32, 48)
    assert not any((fits_fp8(15, 32, 48), fits_fp8(16, 24, 48), fits_fp8(16, 32, 40), fits_fp8(0, 32, 48)))


def test_an_activation_is_quantized_once_until_it_changes() -> None:
    x = torch.randn(2, 16, 32)
    first = activation_to_fp8(x, CURRENT, "x")
    assert activation_to_fp8(x, CURRENT, "x") is first
    x.mul_(2)
    second = activation_to_fp8(x, CURRENT, "x")
    assert second is not first
    assert second.scale == 2 * first.scale
    assert activation_to_fp8(x.clone(), CURRENT, "x") is not second


def test_an_activation_is_quantized_anew_with_the_scale_of_the_next_step() -> None:
    scaling, x, larger = delayed(), torch.randn(16, 32), torch.full((16, 32), 100.0)
    first = activation_to_fp8(x, scaling, "x")
    assert activation_to_fp8(x, scaling, "x") is first
    activation_to_fp8(larger, scaling, "x")
    scaling.update()
    second = activation_to_fp8(x, scaling, "x")
    torch.testing.assert_close(second.rows.float() * second.scale, x, rtol=2**-4, atol=0.01)


def test_sequences_are_flattened() -> None:
    x, weight, _ = operands(64, 32, 16)
    folded = fp8_linear(x.view(4, 16, 32), weight, CURRENT, NAMES)
    assert torch.equal(folded, fp8_linear(x, weight, CURRENT, NAMES).view(4, 16, 16))


@pytest.mark.parametrize("shape", [*SHAPES, LAYERS_OF_8B[1]], ids=str)
def test_delayed_scaling_takes_the_scales_of_earlier_steps(shape: tuple[int, int, int], device: torch.device) -> None:
    """In the first step a tensor has its own scale, with a margin; later ones clamp what has grown beyond it."""
    scaling, amaxes = delayed(device), []
    for factor in (1.0, 4.0, 0.5):
        x, weight, grad = operands(*shape, device=device)
        x, grad = (x.detach() * factor).requires_grad_(), grad * factor
        amaxes.append([t.detach().to(torch.bfloat16).abs().max().float() for t in (x, weight, grad)])
        history = torch.tensor(amaxes if len(amaxes) == 1 else amaxes[:-1]).amax(0)
        scales = tuple((history * (MARGIN / torch.tensor([448.0, 448.0, 57344.0]))).to(device))
        assert_reference(results(x, weight, grad, scaling), x, weight, grad, scales)
        scaling.update()
