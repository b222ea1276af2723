"""Scales known beforehand: from the steps before, and from the tensor itself where there are none."""

import math

import pytest
import torch

from llmb.ops.gemm.fp8_linear import E5M2
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import MARGIN, Scales
from llmb.ops.quant.fp8_quant import Gauge, cast_both

CPU = torch.device("cpu")


def must_not_look(*_gauges: Gauge) -> None:
    raise AssertionError("the scale is known")


def step(scales: Scales, **sizes: float) -> dict[str, float]:
    """Goes through tensors with these magnitudes; gives their scales times the format's largest number."""
    found = {}
    for name, size in sizes.items():
        x = torch.full((2, 2), size)
        (gauge,) = scales.gauges(name, look=lambda gauge, x=x: cast_both(x, gauge))
        found[name] = gauge.scale.item() * {"x": 448.0, "dx": 57344.0}[name]
        cast_both(x, gauge)
    scales.roll()
    return found


def new(steps: int = 3) -> Scales:
    return Scales({"x": E4M3, "dx": E5M2}, CPU, steps)


def close(found: dict[str, float], **wanted: float) -> bool:
    return found.keys() == wanted.keys() and all(
        math.isclose(found[k], MARGIN * wanted[k], rel_tol=1e-6) for k in wanted
    )


def test_a_tensor_is_looked_at_once_and_then_goes_by_what_it_was() -> None:
    scales = new()
    assert close(step(scales, x=3.0, dx=1e-6), x=3.0, dx=1e-6)
    assert close(step(scales, x=10.0, dx=1e-7), x=3.0, dx=1e-6)
    assert close(step(scales, x=1.0, dx=1e-7), x=10.0, dx=1e-6)
    scales.gauges("x", "dx", look=must_not_look)


def test_what_was_long_ago_is_forgotten() -> None:
    scales = new(steps=2)
    found = [step(scales, x=size)["x"] for size in (8.0, 4.0, 2.0, 1.0, 1.0)]
    torch.testing.assert_close(found, [MARGIN * size for size in (8.0, 8.0, 8.0, 4.0, 2.0)])


def test_all_chunks_of_a_step_count_and_have_one_scale() -> None:
    scales, found = new(), []
    for size, look in ((1.0, cast_both), (5.0, None), (2.0, None)):
        x = torch.full((1, 1), size)
        (gauge,) = scales.gauges("x", look=must_not_look if look is None else lambda gauge, x=x: cast_both(x, gauge))
        cast_both(x, gauge)
        found.append(gauge.scale.item())
    assert found[0] == found[1] == found[2]
    scales.roll()
    assert close(step(scales, x=1.0), x=5.0)


def test_a_tensor_that_comes_later_is_looked_at_then() -> None:
    scales = new()
    step(scales, x=1.0)
    assert close(step(scales, x=1.0, dx=7.0), x=1.0, dx=7.0)
    scales.gauges("x", "dx", look=must_not_look)


@pytest.mark.parametrize("paused", range(6))
def test_what_is_kept_goes_on_as_if_there_had_been_no_pause(paused: int) -> None:
    """Wherever the oldest of three steps lies, with one of the tensors not seen before the fourth."""
    sizes = [{"x": 8.0}, {"x": 4.0}, {"x": 2.0}, {"x": 1.0, "dx": 9.0}, {"x": 0.5, "dx": 3.0}, {"x": 7.0, "dx": 1.0}]
    straight, stopped, resumed = new(), new(), new()
    expected = [step(straight, **one) for one in sizes]
    found = [step(stopped, **one) for one in sizes[:paused]]
    resumed.restore(stopped.kept())
    assert found + [step(resumed, **one) for one in sizes[paused:]] == expected
    for name, tensor in straight.kept().items():
        assert torch.equal(tensor, resumed.kept()[name])


def test_zeros_say_nothing_and_the_smallest_numbers_have_an_inverse() -> None:
    scales = new(steps=1)
    assert step(scales, x=0.0)["x"] == 448.0
    assert step(scales, x=1e-40)["x"] == 448.0
    (gauge,) = scales.gauges("x", look=must_not_look)
    assert gauge.scale > 0
    assert gauge.scale.reciprocal().isfinite()


def test_what_is_not_finite_spoils_the_next_step() -> None:
    for lost in (math.inf, math.nan):
        scales = new()
        step(scales, x=1.0)
        step(scales, x=lost)
        (gauge,) = scales.gauges("x", look=must_not_look)
        rows = torch.empty(16, 16, dtype=E4M3)
        cast_both(torch.ones(16, 16), gauge, rows)
        assert (rows.float() * gauge.scale).isnan().all()


def test_scales_change_in_place() -> None:
    """Kernels that are recorded once find the new ones."""
    scales = new()
    (before,) = scales.gauges("x", look=lambda gauge: cast_both(torch.ones(1, 1), gauge))
    old = before.scale.item()
    cast_both(torch.full((1, 1), 4.0), before)
    scales.roll()
    assert math.isclose(before.scale.item(), 4 * old, rel_tol=1e-6)
    assert before.amax.item() == 0


def test_scales_lie_where_products_take_them() -> None:
    """cuBLAS refuses a scale that does not begin at a multiple of 16 bytes."""
    scales = Scales(dict.fromkeys("abcde", E4M3), CPU)
    assert all(one.scale.data_ptr() % 16 == 0 for one in scales.gauges(*"abcde", look=lambda *_: None))
