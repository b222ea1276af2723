"""Memory-bound kernels of a training step on a GPU, at the sizes of Llama: each against its reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmb.ops.activation.activation import activation_backward, swiglu, swiglu_backward
from llmb.ops.activation.swiglu_fp8 import swiglu_backward_fp8, swiglu_fp8
from llmb.ops.loss.cross_entropy import cross_entropy_grad_
from llmb.ops.loss.scaled_add import scaled_add_
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.optim.adam import adam_scalars, adam_step
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2, ScaleAmax, padded_tokens, quantize_fp8
from llmb.ops.rope.rope import apply_rope_, apply_rope_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

GPU = torch.device("cuda", 0)
BF16, FP32 = torch.bfloat16, torch.float32
ROUNDED = {BF16: 0.003, FP32: 1e-6}  # relative error of rounding once
EPS = 1e-5


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "c"), [(4099, 4096), (1, 4096), (515, 8192), (300, 5120), (1000, 2048), (77, 100)])
def test_rms_norm_forward_and_backward(n: int, c: int, dtype: torch.dtype) -> None:
    dy, x, d_residual = (randn(n, c, seed=seed, dtype=dtype) for seed in range(3))
    weight = randn(c, seed=3, dtype=dtype)
    exact_out = torch.empty(n, c, dtype=torch.float64, device=GPU)
    exact_dweight = torch.ones(c, dtype=torch.float64, device=GPU)
    doubles = [tensor.double() for tensor in (dy, x, weight, d_residual)]
    exact_y = rms_norm.reference(doubles[1], doubles[2], EPS)
    rms_norm_backward.reference(*doubles[:3], EPS, doubles[3], exact_out, exact_dweight, accumulate=True)
    assert relative_error(rms_norm(x, weight, EPS), exact_y) < ROUNDED[dtype]
    for out in (torch.empty_like(x), d_residual.clone(), dy.clone()):
        dweight = torch.ones(c, dtype=FP32, device=GPU)
        rms_norm_backward(dy, x, weight, EPS, d_residual, out, dweight, accumulate=True)
        assert relative_error(out, exact_out) < ROUNDED[dtype]
        assert relative_error(dweight, exact_dweight) < 1e-5
    overwritten = torch.full((c,), torch.nan, device=GPU)
    rms_norm_backward(dy, x, weight, EPS, d_residual, dy, overwritten, accumulate=False)  # out is dy itself
    assert relative_error(dy, exact_out) < ROUNDED[dtype]
    assert relative_error(overwritten + 1, exact_dweight) < 1e-5


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "f"), [(1025, 14336), (1, 14336), (100, 11008), (33, 1001)])
def test_swiglu_forward_and_backward(n: int, f: int, dtype: torch.dtype) -> None:
    dact, h = randn(n, f, dtype=dtype), randn(n, 2 * f, seed=1, dtype=dtype)
    exact_act, exact_grad = dact.double(), h.double()
    halves = exact_grad.chunk(2, dim=-1)
    activation_backward.reference(exact_act, halves[0], "silu", halves[1], halves, recompute=True)
    assert relative_error(swiglu(h), exact_act) < ROUNDED[dtype]
    swiglu_backward(dact, h)
    assert relative_error(h, exact_grad) < ROUNDED[dtype]
    assert relative_error(dact, exact_act) < ROUNDED[dtype]


def scale_amax_of(scale: float) -> ScaleAmax:
    return ScaleAmax(torch.tensor(scale, device=GPU), torch.tensor(0.0, device=GPU))


def fp8_layouts(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and columns, full of values that must be overwritten."""
    return torch.full((n, k), 7.0, device=GPU).to(dtype), torch.full((k, padded_tokens(n)), 7.0, device=GPU).to(dtype)


def fraction_different(actual: Tensor, expected: Tensor) -> float:
    """Fraction of values that differ; a zero has either sign."""
    return (actual.float() != expected.float()).float().mean().item()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("n", "k"), [(16384, 4096), (4099, 6144), (1, 4096), (28672, 1000), (300, 100)])
def test_quantize_fp8_has_the_bits_of_the_reference(n: int, k: int, dtype: torch.dtype) -> None:
    """A thousandth of the values is beyond the range."""
    x = randn(n, k)
    scale = 3.3 / torch.finfo(dtype).max
    expected, reference = fp8_layouts(n, k, dtype), scale_amax_of(scale)
    quantize_fp8.reference(x, reference, *expected)
    for requested in ((True, True), (True, False), (False, True)):
        actual, kernel = fp8_layouts(n, k, dtype), scale_amax_of(scale)
        quantize_fp8(x, kernel, *(out if wants else None for out, wants in zip(actual, requested, strict=True)))
        for a, b, wants in zip(actual, expected, requested, strict=True):
            assert not wants or fraction_different(a, b) == 0
        assert kernel.amax == reference.amax


@pytest.mark.parametrize(("n", "c"), [(16384, 4096), (515, 8192), (300, 5120), (77, 112), (1, 4096)])
def test_rms_norm_fp8(n: int, c: int) -> None:
    x, weight = randn(n, c), randn(c, seed=1)
    expected, reference = fp8_layouts(n, c, E4M3), scale_amax_of(0.02)
    rms_norm_fp8.reference(x, weight, EPS, reference, *expected)
    for requested in ((True, True), (True, False), (False, True)):
        actual, kernel = fp8_layouts(n, c, E4M3), scale_amax_of(0.02)
        outputs = (out if wants else None for out, wants in zip(actual, requested, strict=True))
        rms_norm_fp8(x, weight, EPS, kernel, *outputs)
        for a, b, wants in zip(actual, expected, requested, strict=True):
            assert not wants or fraction_different(a, b) < 1e-3  # the last bits of fp32 may decide
            assert not wants or relative_error(a.float(), b.float()) < 1e-3
        torch.testing.assert_close(kernel.amax, reference.amax, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("n", "f"), [(8192, 14336), (100, 11008), (33, 1008), (1, 14336)])
def test_swiglu_fp8_forward_and_backward(n: int, f: int) -> None:
    dact, h = randn(n, f), randn(n, 2 * f, seed=1)
    expected, reference = fp8_layouts(n, f, E4M3), scale_amax_of(0.03)
    swiglu_fp8.reference(h, reference, *expected)
    actual, kernel = fp8_layouts(n, f, E4M3), scale_amax_of(0.03)
    swiglu_fp8(h, kernel, *actual)
    rows, rows_only = fp8_layouts(n, f, E4M3)[0], scale_amax_of(0.03)
    swiglu_fp8(h, rows_only, rows)
    pairs = [*zip(actual, expected, strict=True), (rows, expected[0])]
    exact, back = ((*fp8_layouts(n, 2 * f, E5M2), fp8_layouts(n, f, E4M3)[1]) for _ in range(2))
    (dh_reference, act_reference), (dh_kernel, act_kernel) = (
        (scale_amax_of(4e-4), scale_amax_of(0.03)) for _ in range(2)
    )
    swiglu_backward_fp8.reference(dact, h, dh_reference, exact[0], exact[1], act_reference, exact[2])
    swiglu_backward_fp8(dact, h, dh_kernel, back[0], back[1], act_kernel, back[2])
    for a, b in (*pairs, *zip(back, exact, strict=True)):
        assert fraction_different(a, b) < 1e-3
        assert relative_error(a.float(), b.float()) < 1e-3
    scalars = ((kernel, reference), (rows_only, reference), (dh_kernel, dh_reference), (act_kernel, act_reference))
    for x, y in scalars:
        torch.testing.assert_close(x.amax, y.amax, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("heads", "width"), [(40, 128), (8, 128), (5, 64), (20, 96)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope_inside_rows_of_all_heads(heads: int, width: int, inverse: bool) -> None:
    rows = randn(4097, 48 * 128)
    angle = torch.rand(4097, width // 2, device=GPU) * 1000
    rows_before, view = rows.clone(), rows[:, : heads * width].unflatten(1, (heads, width))
    exact = view.double()
    apply_rope_out.reference(exact, exact, angle.cos().double(), angle.sin().double(), inverse)
    apply_rope_(view, angle.cos(), angle.sin(), inverse)
    assert relative_error(view, exact) < ROUNDED[BF16]
    assert torch.equal(rows[:, heads * width :], rows_before[:, heads * width :])


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "v"), [(300, 128256), (7, 152064), (5, 50257), (1, 10)])
@pytest.mark.parametrize("magnitude", [1.0, 100.0])
def test_cross_entropy_grad(n: int, v: int, magnitude: float, dtype: torch.dtype) -> None:
    logits = (randn(n, v) * magnitude).to(dtype)
    labels = torch.randint(0, v, (n,), device=GPU, generator=torch.Generator(GPU).manual_seed(1))
    labels[3::4] = -1
    exact_grad, exact_losses = logits.double(), torch.empty(n, dtype=torch.float64, device=GPU)
    cross_entropy_grad_.reference(exact_grad, labels, 0.125, exact_losses)
    for scale in (0.125, torch.tensor(0.125, device=GPU)):
        grad, losses = logits.clone(), torch.full((n,), torch.nan, device=GPU)
        cross_entropy_grad_(grad, labels, scale, losses)
        assert ((losses - exact_losses).abs() <= 2e-5 * (1 + exact_losses.abs())).all()
        assert ((grad.double() - exact_grad).abs() <= ROUNDED[dtype] * 2 * exact_grad.abs() + 1e-6).all()
        assert (grad[labels < 0] == 0).all()


STATES: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype, bool, Any]] = {
    "fp32": (FP32, FP32, FP32, False, "nearest"),
    "master": (BF16, FP32, FP32, True, "nearest"),
    "stochastic": (BF16, BF16, BF16, False, "stochastic"),
    "bf16": (BF16, BF16, BF16, False, "nearest"),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("n", [10_000_000, 1_000_003])
def test_adam_step_has_the_bits_of_the_reference(name: str, n: int) -> None:
    param_dtype, grad_dtype, moment_dtype, has_low, rounding = STATES[name]
    tensors: list[Tensor | None] = [
        randn(n, dtype=param_dtype),
        randn(n, seed=1, dtype=grad_dtype),
        (randn(n, seed=2, dtype=FP32) * 0.1).to(moment_dtype),
        (randn(n, seed=3, dtype=FP32) ** 2 * 1e-3).to(moment_dtype),
        torch.randint(-(2**15), 2**15, (n,), device=GPU).to(torch.int16) if has_low else None,
    ]
    scalars = adam_scalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=2, seed=3)
    for value in (0.3, torch.inf):
        factor = torch.tensor(value, device=GPU)
        expected, actual = ([None if x is None else x.clone() for x in tensors] for _ in range(2))
        adam_step.reference(*expected, scalars, factor, rounding)  # type: ignore[arg-type]
        adam_step.triton(*actual, scalars, factor, rounding)  # type: ignore[arg-type]
        for a, b in zip(expected, actual, strict=True):
            assert (a is None and b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_adam_step_is_compiled_once_for_all_steps() -> None:
    from llmb.ops.optim.adam_triton import _adam_update

    param, grad, m, v = (torch.zeros(4096, device=GPU) for _ in range(4))

    def step_at(lr: float, step: int, seed: int) -> int:
        scalars = adam_scalars(lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, seed=seed)
        adam_step.triton(param, grad, m, v, None, scalars, torch.tensor(1.0, device=GPU), "stochastic")
        return sum(len(kernels[0]) for kernels in _adam_update.device_caches.values())

    first = step_at(1e-3, 1, 0)
    assert all(step_at(lr, step, seed) == first for lr, step, seed in ((0, 2, 1), (1, 16, 16), (1e-5, 100_000, 2**40)))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("accumulate", [False, True])
def test_scaled_add(dtype: torch.dtype, accumulate: bool) -> None:
    x, scale = randn(4099, 4096, dtype=FP32), torch.tensor(0.3, device=GPU)
    total = randn(4099, 4096, seed=1, dtype=dtype)
    expected = total.double()
    scaled_add_.reference(expected, x.double(), scale, accumulate)
    scaled_add_(total, x, scale, accumulate)
    assert relative_error(total, expected) < ROUNDED[dtype]
