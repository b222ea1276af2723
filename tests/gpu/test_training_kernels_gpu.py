"""The memory-bound kernels of a training step on a real GPU, at the sizes of Llama: each against plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmb.ops.activation.swiglu import swiglu, swiglu_backward, swiglu_backward_reference
from llmb.ops.activation.swiglu_fp8 import (
    swiglu_backward_fp8,
    swiglu_backward_fp8_reference,
    swiglu_fp8,
    swiglu_fp8_reference,
)
from llmb.ops.gemm.fp8_linear import E5M2
from llmb.ops.loss.cross_entropy import cross_entropy_slope_, cross_entropy_slope_reference_
from llmb.ops.loss.scaled_add import scaled_add_, scaled_add_reference_
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward, rms_norm_backward_reference, rms_norm_reference
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8, rms_norm_fp8_reference
from llmb.ops.optim.adam import adam_scalars, adam_update_reference
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import Gauge, cast_both, cast_both_reference, padded
from llmb.ops.rope.rope import rotate_in_place, rotate_into_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

GPU = torch.device("cuda", 0)
BF16, FP32 = torch.bfloat16, torch.float32
ROUNDED = {BF16: 0.003, FP32: 1e-6}  # relative error of rounding once
EPS = 1e-5


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)).to(dtype)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "c"), [(4099, 4096), (1, 4096), (515, 8192), (300, 5120), (1000, 2048), (77, 100)])
def test_norm_there_and_back(n: int, c: int, dtype: torch.dtype) -> None:
    dy, x, dresidual = (drawn(n, c, seed=seed, dtype=dtype) for seed in range(3))
    weight = drawn(c, seed=3, dtype=dtype)
    exact_y, exact_out = (torch.empty(n, c, dtype=torch.float64, device=GPU) for _ in range(2))
    exact_dweight = torch.ones(c, dtype=torch.float64, device=GPU)
    doubles = [one.double() for one in (dy, x, weight, dresidual)]
    rms_norm_reference(doubles[1], doubles[2], EPS, exact_y)
    rms_norm_backward_reference(*doubles[:3], EPS, doubles[3], exact_out, exact_dweight, False)
    assert relative_error(rms_norm(x, weight, EPS), exact_y) < ROUNDED[dtype]
    for over in (torch.empty_like(x), dresidual.clone(), dy.clone()):
        dweight = torch.ones(c, dtype=FP32, device=GPU)
        rms_norm_backward(dy, x, weight, EPS, dresidual, over, dweight, False)
        assert relative_error(over, exact_out) < ROUNDED[dtype]
        assert relative_error(dweight, exact_dweight) < 1e-5
    again = torch.full((c,), torch.nan, device=GPU)
    rms_norm_backward(dy, x, weight, EPS, dresidual, dy, again, True)  # over dy itself
    assert relative_error(dy, exact_out) < ROUNDED[dtype]
    assert relative_error(again + 1, exact_dweight) < 1e-5


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "f"), [(1025, 14336), (1, 14336), (100, 11008), (33, 1001)])
def test_gated_activation_there_and_back(n: int, f: int, dtype: torch.dtype) -> None:
    dact, h = drawn(n, f, dtype=dtype), drawn(n, 2 * f, seed=1, dtype=dtype)
    exact_act, exact_slope = dact.double(), h.double()
    swiglu_backward_reference(exact_act, exact_slope)
    assert relative_error(swiglu(h), exact_act) < ROUNDED[dtype]
    swiglu_backward(dact, h)
    assert relative_error(h, exact_slope) < ROUNDED[dtype]
    assert relative_error(dact, exact_act) < ROUNDED[dtype]


def gauge_of(scale: float) -> Gauge:
    return Gauge(torch.tensor(scale, device=GPU), torch.tensor(0.0, device=GPU))


def both_forms(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and columns, full of what must not stay."""
    return torch.full((n, k), 7.0, device=GPU).to(dtype), torch.full((k, padded(n)), 7.0, device=GPU).to(dtype)


def share_that_differs(found: Tensor, wanted: Tensor) -> float:
    """Numbers that are not the same; a zero has either sign."""
    return (found.float() != wanted.float()).float().mean().item()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("n", "k"), [(16384, 4096), (4099, 6144), (1, 4096), (28672, 1000), (300, 100)])
def test_a_cast_in_both_forms_is_that_of_torch_to_the_bit(n: int, k: int, dtype: torch.dtype) -> None:
    """A thousandth of the numbers is beyond the range."""
    x = drawn(n, k)
    scale = 3.3 / torch.finfo(dtype).max
    wanted, here = both_forms(n, k, dtype), gauge_of(scale)
    cast_both_reference(x, here, *wanted)
    for forms in ((True, True), (True, False), (False, True)):
        found, there = both_forms(n, k, dtype), gauge_of(scale)
        cast_both(x, there, *(one if form else None for one, form in zip(found, forms, strict=True)))
        for one, plain, form in zip(found, wanted, forms, strict=True):
            assert not form or share_that_differs(one, plain) == 0
        assert there.amax == here.amax


@pytest.mark.parametrize(("n", "c"), [(16384, 4096), (515, 8192), (300, 5120), (77, 112), (1, 4096)])
def test_the_norm_in_8_bits(n: int, c: int) -> None:
    x, weight = drawn(n, c), drawn(c, seed=1)
    wanted, here = both_forms(n, c, E4M3), gauge_of(0.02)
    rms_norm_fp8_reference(x, weight, EPS, here, *wanted)
    for forms in ((True, True), (True, False), (False, True)):
        found, there = both_forms(n, c, E4M3), gauge_of(0.02)
        rms_norm_fp8(x, weight, EPS, there, *(one if form else None for one, form in zip(found, forms, strict=True)))
        for one, plain, form in zip(found, wanted, forms, strict=True):
            assert not form or share_that_differs(one, plain) < 1e-3  # the last bits of fp32 may decide
            assert not form or relative_error(one.float(), plain.float()) < 1e-3
        torch.testing.assert_close(there.amax, here.amax, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("n", "f"), [(8192, 14336), (100, 11008), (33, 1008), (1, 14336)])
def test_the_gated_activation_in_8_bits_there_and_back(n: int, f: int) -> None:
    dact, h = drawn(n, f), drawn(n, 2 * f, seed=1)
    wanted, here = both_forms(n, f, E4M3), gauge_of(0.03)
    swiglu_fp8_reference(h, here, *wanted)
    found, there = both_forms(n, f, E4M3), gauge_of(0.03)
    swiglu_fp8(h, there, *found)
    rows, alone = both_forms(n, f, E4M3)[0], gauge_of(0.03)
    swiglu_fp8(h, alone, rows)
    pairs = [*zip(found, wanted, strict=True), (rows, wanted[0])]
    gauges = [(there, here), (alone, here)]
    exact, back = ((*both_forms(n, 2 * f, E5M2), both_forms(n, f, E4M3)[1]) for _ in range(2))
    (slope_here, act_here), (slope_there, act_there) = ((gauge_of(4e-4), gauge_of(0.03)) for _ in range(2))
    swiglu_backward_fp8_reference(dact, h, slope_here, exact[0], exact[1], act_here, exact[2])
    swiglu_backward_fp8(dact, h, slope_there, back[0], back[1], act_there, back[2])
    for one, plain in (*pairs, *zip(back, exact, strict=True)):
        assert share_that_differs(one, plain) < 1e-3
        assert relative_error(one.float(), plain.float()) < 1e-3
    for one, plain in (*gauges, (slope_there, slope_here), (act_there, act_here)):
        torch.testing.assert_close(one.amax, plain.amax, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("heads", "width"), [(40, 128), (8, 128), (5, 64), (20, 96)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_inside_rows_of_all_heads(heads: int, width: int, inverse: bool) -> None:
    rows = drawn(4097, 48 * 128)
    angle = torch.rand(4097, width // 2, device=GPU) * 1000
    untouched, view = rows.clone(), rows[:, : heads * width].unflatten(1, (heads, width))
    exact = view.double()
    rotate_into_reference(exact, exact, angle.cos().double(), angle.sin().double(), inverse)
    rotate_in_place(view, angle.cos(), angle.sin(), inverse)
    assert relative_error(view, exact) < ROUNDED[BF16]
    assert torch.equal(rows[:, heads * width :], untouched[:, heads * width :])


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "v"), [(300, 128256), (7, 152064), (5, 50257), (1, 10)])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_loss_and_slope_over_the_logits(n: int, v: int, size: float, dtype: torch.dtype) -> None:
    logits = (drawn(n, v) * size).to(dtype)
    labels = torch.randint(0, v, (n,), device=GPU, generator=torch.Generator(GPU).manual_seed(1))
    labels[3::4] = -1
    exact_slope, exact_losses = logits.double(), torch.empty(n, dtype=torch.float64, device=GPU)
    cross_entropy_slope_reference_(exact_slope, labels, 0.125, exact_losses)
    for scale in (0.125, torch.tensor(0.125, device=GPU)):
        slope, losses = logits.clone(), torch.full((n,), torch.nan, device=GPU)
        cross_entropy_slope_(slope, labels, scale, losses)
        assert ((losses - exact_losses).abs() <= 2e-5 * (1 + exact_losses.abs())).all()
        assert ((slope.double() - exact_slope).abs() <= ROUNDED[dtype] * 2 * exact_slope.abs() + 1e-6).all()
        assert (slope[labels < 0] == 0).all()


FORMATS: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype, bool, Any]] = {
    "fp32": (FP32, FP32, FP32, False, "nearest"),
    "master": (BF16, FP32, FP32, True, "nearest"),
    "stochastic": (BF16, BF16, BF16, False, "stochastic"),
    "bf16": (BF16, BF16, BF16, False, "nearest"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [10_000_000, 1_000_003])
def test_a_step_of_adam_is_that_of_torch_to_the_bit(name: str, n: int) -> None:
    from llmb.ops.optim.adam_triton import adam_update_triton

    param_format, grad_format, state_format, keeps_low, rounding = FORMATS[name]
    tensors: list[Tensor | None] = [
        drawn(n, dtype=param_format),
        drawn(n, seed=1, dtype=grad_format),
        (drawn(n, seed=2, dtype=FP32) * 0.1).to(state_format),
        (drawn(n, seed=3, dtype=FP32) ** 2 * 1e-3).to(state_format),
        torch.randint(-(2**15), 2**15, (n,), device=GPU).to(torch.int16) if keeps_low else None,
    ]
    scalars = adam_scalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, step=2, seed=3)
    for factor in (0.3, torch.inf):
        factor_there = torch.tensor(factor, device=GPU)
        wanted, found = ([None if one is None else one.clone() for one in tensors] for _ in range(2))
        adam_update_reference(*wanted, scalars, factor_there, rounding)  # type: ignore[arg-type]
        adam_update_triton(*found, scalars, factor_there, rounding)  # type: ignore[arg-type]
        for one, other in zip(wanted, found, strict=True):
            assert (one is None and other is None) or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_step_of_adam_is_compiled_once_for_all_steps() -> None:
    from llmb.ops.optim.adam_triton import _adam_update, adam_update_triton

    param, grad, m, v = (torch.zeros(4096, device=GPU) for _ in range(4))

    def step_at(lr: float, step: int, seed: int) -> int:
        scalars = adam_scalars(lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, step=step, seed=seed)
        adam_update_triton(param, grad, m, v, None, scalars, torch.tensor(1.0, device=GPU), "stochastic")
        return sum(len(kernels[0]) for kernels in _adam_update.device_caches.values())

    first = step_at(1e-3, 1, 0)
    assert all(step_at(lr, step, seed) == first for lr, step, seed in ((0, 2, 1), (1, 16, 16), (1e-5, 100_000, 2**40)))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_scaled_gradient_is_added(dtype: torch.dtype, fresh: bool) -> None:
    part, scale = drawn(4099, 4096, dtype=FP32), torch.tensor(0.3, device=GPU)
    total = drawn(4099, 4096, seed=1, dtype=dtype)
    wanted = total.double()
    scaled_add_reference_(wanted, part.double(), scale, fresh)
    scaled_add_(total, part, scale, fresh)
    assert relative_error(total, wanted) < ROUNDED[dtype]
