"""Scales from the amax history, or from the tensor itself; over ranks: tests/train/test_sharded_scaling.py."""

import math
from functools import partial

import pytest
import torch

from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import MARGIN, CurrentScaling, DelayedScaling
from llmb.ops.quant.fp8_quant import E5M2, ScaleAmax, quantize_fp8, tensor_scale

CPU = torch.device("cpu")


def must_not_measure(*_scale_amax: ScaleAmax) -> None:
    raise AssertionError("the scale is known")


def step(scales: DelayedScaling, **magnitudes: float) -> dict[str, float]:
    """Quantize tensors of these magnitudes; return their scales times the largest number of the dtype."""
    ranges = {}
    for name, magnitude in magnitudes.items():
        x = torch.full((2, 2), magnitude)
        (scale_amax,) = scales.scale_amax_of(name, measure=partial(quantize_fp8, x))
        ranges[name] = scale_amax.scale.item() * {"x": 448.0, "dx": 57344.0}[name]
        quantize_fp8(x, scale_amax)
    scales.update()
    return ranges


def new(steps: int = 3) -> DelayedScaling:
    return DelayedScaling({"x": E4M3, "dx": E5M2}, CPU, steps=steps)


def close(actual: dict[str, float], **expected: float) -> bool:
    return actual.keys() == expected.keys() and all(
        math.isclose(actual[k], MARGIN * expected[k], rel_tol=1e-6) for k in expected
    )


def test_a_new_tensor_is_measured_once_and_then_follows_its_history() -> None:
    later = new()
    step(later, x=1.0)
    assert close(step(later, x=1.0, dx=7.0), x=1.0, dx=7.0)
    scales = new()
    assert close(step(scales, x=3.0, dx=1e-6), x=3.0, dx=1e-6)
    assert close(step(scales, x=10.0, dx=1e-7), x=3.0, dx=1e-6)
    assert close(step(scales, x=1.0, dx=1e-7), x=10.0, dx=1e-6)
    scales.scale_amax_of("x", "dx", measure=must_not_measure)


def test_old_steps_leave_the_history() -> None:
    scales = new(steps=2)
    ranges = [step(scales, x=magnitude)["x"] for magnitude in (8.0, 4.0, 2.0, 1.0, 1.0)]
    torch.testing.assert_close(ranges, [MARGIN * magnitude for magnitude in (8.0, 8.0, 8.0, 4.0, 2.0)])


def test_repeated_step_forgets_its_first_attempt() -> None:
    scales = new()
    step(scales, x=3.0)
    (scale_amax,) = scales.scale_amax_of("x", measure=must_not_measure)
    quantize_fp8(torch.full((2, 2), 100.0), scale_amax)
    scales.restart_step()
    step(scales, x=4.0)
    assert close(step(scales, x=1.0), x=4.0)


def test_all_chunks_of_a_step_share_one_scale() -> None:
    scales, used = new(), []
    for magnitude, is_first in ((1.0, True), (5.0, False), (2.0, False)):
        x = torch.full((1, 1), magnitude)
        measure = partial(quantize_fp8, x) if is_first else must_not_measure
        (scale_amax,) = scales.scale_amax_of("x", measure=measure)
        quantize_fp8(x, scale_amax)
        used.append(scale_amax.scale.item())
    assert used[0] == used[1] == used[2]
    scales.update()
    assert close(step(scales, x=1.0), x=5.0)


@pytest.mark.parametrize("paused", range(6))
def test_state_dict_resumes_exactly(paused: int) -> None:
    """At each position of the ring buffer, with one tensor not measured before the fourth step."""
    steps = [{"x": 8.0}, {"x": 4.0}, {"x": 2.0}, {"x": 1.0, "dx": 9.0}, {"x": 0.5, "dx": 3.0}, {"x": 7.0, "dx": 1.0}]
    uninterrupted, stopped, resumed = new(), new(), new()
    expected = [step(uninterrupted, **magnitudes) for magnitudes in steps]
    actual = [step(stopped, **magnitudes) for magnitudes in steps[:paused]]
    resumed.load_state_dict(stopped.state_dict())
    assert actual + [step(resumed, **magnitudes) for magnitudes in steps[paused:]] == expected
    for name, tensor in uninterrupted.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])


def test_zeros_have_scale_one_and_the_smallest_scales_have_an_inverse() -> None:
    scales = new(steps=1)
    assert step(scales, x=0.0)["x"] == 448.0
    assert step(scales, x=1e-40)["x"] == 448.0
    (scale_amax,) = scales.scale_amax_of("x", measure=must_not_measure)
    assert scale_amax.scale > 0
    assert scale_amax.scale.reciprocal().isfinite()


def test_nonfinite_values_spoil_the_next_step() -> None:
    for value in (math.inf, math.nan):
        scales = new()
        step(scales, x=1.0)
        step(scales, x=value)
        (scale_amax,) = scales.scale_amax_of("x", measure=must_not_measure)
        rows = torch.empty(16, 16, dtype=E4M3)
        quantize_fp8(torch.ones(16, 16), scale_amax, rows)
        assert (rows.float() * scale_amax.scale).isnan().all()


def test_scales_change_in_place() -> None:
    """CUDA graphs that were captured once read the new ones."""
    scales = new()
    (before,) = scales.scale_amax_of("x", measure=partial(quantize_fp8, torch.ones(1, 1)))
    old = before.scale.item()
    quantize_fp8(torch.full((1, 1), 4.0), before)
    scales.update()
    assert math.isclose(before.scale.item(), 4 * old, rel_tol=1e-6)
    assert before.amax.item() == 0


def test_scales_are_aligned() -> None:
    """cuBLAS requires scales aligned to 16 bytes."""
    scales = DelayedScaling(dict.fromkeys("abcde", E4M3), CPU)
    assert all(x.scale.data_ptr() % 16 == 0 for x in scales.scale_amax_of(*"abcde", measure=lambda *_: None))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_current_scaling_has_the_scale_of_each_tensor(dtype: torch.dtype) -> None:
    scales = CurrentScaling({"x": dtype, "y": dtype}, CPU)
    for magnitude in (1.0, 1e-30, 0.0, 300.0, math.inf):
        x, y = torch.randn(16, 16) * magnitude, torch.randn(16, 16)
        both = scales.scale_amax_of("x", "y", measure=lambda a, b, x=x, y=y: (quantize_fp8(x, a), quantize_fp8(y, b)))
        for tensor, (scale, amax) in zip((x, y), both, strict=True):
            assert amax is None
            assert scale.data_ptr() % 16 == 0
            torch.testing.assert_close(scale, tensor_scale(tensor, dtype), rtol=0, atol=0, equal_nan=True)
    assert scales.state_dict() == {}


def test_state_of_two_parts_loads_into_one_and_back() -> None:
    """Names are those of the whole model; what a part does not know is ignored, as the format of old checkpoints."""
    names = [f"layers.{layer}.{name}" for layer in range(2) for name in ("x1", "dqkv")]
    dtypes = {name: E5M2 if name.endswith("dqkv") else E4M3 for name in names}
    whole, parts = (
        DelayedScaling(dtypes, CPU),
        [DelayedScaling(dict(list(dtypes.items())[i : i + 2]), CPU) for i in (0, 2)],
    )
    for _step in range(3):
        for name in names[:3]:  # the last one is not measured yet
            x = torch.randn(4, 4)
            for scales in (whole, parts[name.startswith("layers.1")]):
                (scale_amax,) = scales.scale_amax_of(name, measure=partial(quantize_fp8, x))
                quantize_fp8(x, scale_amax)
        for scales in (whole, *parts)[: 3 if _step < 2 else 0]:  # amaxes of a step that has not ended are state too
            scales.update()
    states = parts[0].state_dict() | parts[1].state_dict()
    assert states.keys() == whole.state_dict().keys()
    loaded = DelayedScaling(dtypes, CPU)
    loaded.load_state_dict(states | {"scale": torch.ones(4), "known": torch.ones(4)})
    for part in parts:
        part.load_state_dict(whole.state_dict())
    for scales in (loaded, *parts):
        scales.update()
    whole.update()
    for name, expected in whole.state_dict().items():
        for scales in (loaded, parts[name.startswith("layers.1")]):
            assert torch.equal(scales.state_dict()[name], expected)
    whole.scale_amax_of(*names[:3], measure=must_not_measure)
    loaded.scale_amax_of(*names[:3], measure=must_not_measure)
    with pytest.raises(AssertionError, match="known"):
        loaded.scale_amax_of(names[3], measure=must_not_measure)
