"""The gated activation in 8 bits, there and back: plain torch against `swiglu` and a cast, the kernels against it."""

import math

import pytest
import torch
from torch import Tensor

from llmb.ops.activation.swiglu import swiglu, swiglu_backward
from llmb.ops.activation.swiglu_fp8 import (
    swiglu_backward_fp8,
    swiglu_backward_fp8_reference,
    swiglu_fp8,
    swiglu_fp8_reference,
)
from llmb.ops.gemm.fp8_linear import E5M2, cast
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import Gauge, padded

pytest.importorskip("triton")
from llmb.ops.activation.swiglu_fp8_triton import swiglu_backward_fp8_triton, swiglu_fp8_triton

SHAPES = [(3, 10), (1, 1), (300, 70), (17, 64), (64, 65)]
STEP = {E4M3: (1 / 8, 2**-9), E5M2: (1 / 4, 2**-16)}  # to the next number: relative, and of the smallest


def inputs(n: int, f: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """The activation's slope, and gate beside up."""
    generator = torch.Generator().manual_seed(n + f)
    dact, h = torch.randn(n, f, generator=generator), torch.randn(n, 2 * f, generator=generator) * size
    return dact.bfloat16(), h.bfloat16()


def gauge_on(device: torch.device, scale: float) -> Gauge:
    return Gauge(torch.tensor(scale, device=device), torch.tensor(0.0, device=device))


def room(*shape: int, dtype: torch.dtype = E4M3, device: torch.device) -> Tensor:
    return torch.full(shape, 7.0, device=device).to(dtype)


def backward_room(n: int, f: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the slope, columns of the activation."""
    slope = (room(n, 2 * f, dtype=E5M2, device=device), room(2 * f, padded(n), dtype=E5M2, device=device))
    return *slope, room(f, padded(n), device=device)


def chosen(made: tuple[Tensor, Tensor], forms: tuple[bool, bool]) -> list[Tensor | None]:
    return [one if form else None for one, form in zip(made, forms, strict=True)]


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Where the last bits of fp32 decide the rounding, neighbours are as good; that is rare."""
    assert found.dtype == wanted.dtype
    relative, smallest = STEP[found.dtype]
    found, wanted = found.float().cpu(), wanted.float().cpu()
    near = (found - wanted).abs() <= wanted.abs() * relative + smallest
    return bool(near.all()) and bool(((found != wanted).float().mean() <= 0.01).item())


def test_plain_torch_is_the_activation_and_a_cast() -> None:
    dact, h = inputs(20, 24)
    gauge = gauge_on(h.device, 0.02)
    rows, columns = room(20, 24, device=h.device), room(24, 32, device=h.device)
    swiglu_fp8(h, gauge, rows, columns)
    act = swiglu(h.float())
    wanted = cast(act, gauge.scale, E4M3, rows=True, columns=True)
    assert torch.equal(rows.float(), wanted.rows.float())
    assert torch.equal(columns[:, :20].float(), wanted.columns.float())
    assert gauge.amax == act.abs().max()

    slope_gauge, act_gauge = gauge_on(h.device, 1e-4), gauge_on(h.device, 0.02)
    before = dact.clone(), h.clone()
    slope_rows, slope_columns, act_columns = backward_room(20, 24, h.device)
    swiglu_backward_fp8(dact, h, slope_gauge, slope_rows, slope_columns, act_gauge, act_columns)
    assert torch.equal(dact, before[0])
    assert torch.equal(h, before[1])
    assert torch.equal(act_columns.float(), columns.float())
    slope = h.float()
    swiglu_backward(dact.float(), slope)
    wanted = cast(slope, slope_gauge.scale, E5M2, rows=True, columns=True)
    assert torch.equal(slope_rows.float(), wanted.rows.float())
    assert torch.equal(slope_columns[:, :20].float(), wanted.columns.float())
    assert slope_gauge.amax == slope.abs().max()
    assert act_gauge.amax == act.abs().max()


@pytest.mark.parametrize(("n", "f"), SHAPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_the_kernel_gives_what_torch_gives(n: int, f: int, size: float, device: torch.device) -> None:
    _, h = inputs(n, f, size)
    wanted = room(n, f, device=h.device), room(f, padded(n), device=h.device)
    here = gauge_on(h.device, 0.013 * max(size, 1))
    swiglu_fp8_reference(h, here, *wanted)
    for forms in ((True, True), (True, False), (False, True), (False, False)):
        there = Gauge(here.scale.to(device), torch.tensor(0.0, device=device))
        made = room(n, f, device=device), room(f, padded(n), device=device)
        swiglu_fp8_triton(h.to(device), there, *chosen(made, forms))
        for one, plain, form in zip(made, wanted, forms, strict=True):
            assert alike(one, plain) if form else bool((one.float() == 7).all())
        torch.testing.assert_close(there.amax.cpu(), here.amax, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("n", "f"), SHAPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_the_way_back_gives_what_torch_gives(n: int, f: int, size: float, device: torch.device) -> None:
    dact, h = inputs(n, f, size)
    scales = 3e-4 * max(size, 1), 0.013 * max(size, 1)
    wanted, here = backward_room(n, f, h.device), [gauge_on(h.device, scale) for scale in scales]
    swiglu_backward_fp8_reference(dact, h, here[0], wanted[0], wanted[1], here[1], wanted[2])
    found, there = backward_room(n, f, device), [gauge_on(device, scale) for scale in scales]
    swiglu_backward_fp8_triton(dact.to(device), h.to(device), there[0], found[0], found[1], there[1], found[2])
    for one, plain in zip(found, wanted, strict=True):
        assert alike(one, plain)
    assert torch.equal(found[0].float(), found[1][:, :n].float().T)
    only = [gauge_on(device, scale) for scale in scales]
    swiglu_backward_fp8_triton(dact.to(device), h.to(device), only[0], None, None, only[1], None)
    for gauges in (there, only):
        for one, plain in zip(gauges, here, strict=True):
            torch.testing.assert_close(one.amax.cpu(), plain.amax, rtol=1e-5, atol=0)


def test_rows_may_lie_apart(device: torch.device) -> None:
    dact, h = (one.to(device) for one in inputs(6, 24))
    wide_dact, wide_h = (torch.full((6, 64), 1e9, device=device).bfloat16() for _ in range(2))
    wide_dact[:, 8:32], wide_h[:, 8:56] = dact, h
    results = []
    for slope, gates in ((dact, h), (wide_dact[:, 8:32], wide_h[:, 8:56])):
        rows, (slope_rows, slope_columns, act_columns) = room(6, 24, device=device), backward_room(6, 24, device)
        swiglu_fp8_triton(gates, gauge_on(device, 0.02), rows)
        gauges = gauge_on(device, 1e-4), gauge_on(device, 0.02)
        swiglu_backward_fp8_triton(slope, gates, gauges[0], slope_rows, slope_columns, gauges[1], act_columns)
        results.append([one.float() for one in (rows, slope_rows, slope_columns, act_columns)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_lost_slope_shows(lost: float, device: torch.device) -> None:
    dact, h = (one.to(device) for one in inputs(6, 24))
    dact[2, 3] = lost
    slope, act = gauge_on(device, 1e-4), gauge_on(device, 0.02)
    made = backward_room(6, 24, device)
    swiglu_backward_fp8_triton(dact, h, slope, made[0], made[1], act, made[2])
    assert not slope.amax.isfinite()
    assert act.amax.isfinite()
    assert made[0].float().isnan().any().item() == math.isnan(lost)


def test_all_forms_of_the_way_back_are_made_or_none(device: torch.device) -> None:
    dact, h = (one.to(device) for one in inputs(6, 24))
    gauges, made = (gauge_on(device, 1.0), gauge_on(device, 1.0)), backward_room(6, 24, device)
    with pytest.raises(AssertionError, match="all are given or none"):
        swiglu_backward_fp8_triton(dact, h, gauges[0], made[0], None, gauges[1], made[2])


def test_no_tokens_are_no_work(device: torch.device) -> None:
    h, gauges = torch.empty(0, 32, device=device), (gauge_on(device, 1.0), gauge_on(device, 1.0))
    swiglu_fp8_triton(h, gauges[0], room(0, 16, device=device), room(16, 0, device=device))
    made = backward_room(0, 16, device)
    swiglu_backward_fp8_triton(h[:, :16], h, gauges[0], made[0], made[1], gauges[1], made[2])
    assert all(gauge.amax == 0 for gauge in gauges)
