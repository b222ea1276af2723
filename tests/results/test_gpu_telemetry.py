"""Telemetry of the measured interval: which samples count, percentiles, throttle reasons, cost."""

from dataclasses import replace

import pytest

from llmb.events import GpuSample, RequestDone, RunEnded, RunStarted, StepDone
from llmb.report.summary import figure_rows
from llmb.results.derive import derive

OK = RunEnded(time=100.0, status="ok")


def sample(
    time: float, power: float | None = 600.0, clock: float | None = 1980.0, *reasons: str, **fields
) -> GpuSample:
    return GpuSample(
        time=time, power_w=power, sm_clock_mhz=clock, power_limit_w=700.0, temperature_c=60.0,
        throttle_reasons=reasons, **fields,
    )  # fmt: skip


def steps() -> list[StepDone]:
    """Ten steps of a second each, that end at 11, 12, ..."""
    return [StepDone(step=n, steps=10, seconds=1.0, tokens=8, time=10.0 + n) for n in range(1, 11)]


def test_only_samples_of_the_window_count():
    samples = [sample(10.5, 100.0), sample(14.9, 150.0), sample(15.1), sample(17.0, 700.0, 1755.0, "power cap", "idle")]
    result = derive(None, [RunStarted(time=0.0), *samples, sample(30.0, 50.0), *steps(), OK], window=(6, 10))
    telemetry = result.telemetry
    assert (telemetry.samples, telemetry.gpus) == (2, 1)
    assert telemetry.power_w == pytest.approx({"mean": 650.0, "p5": 605.0, "p50": 650.0, "p95": 695.0})
    assert telemetry.sm_clock_mhz["mean"] == 1867.5
    assert telemetry.power_limit_w == 700.0
    assert telemetry.throttled_fraction == 0.5
    assert telemetry.throttle_reasons == {"power cap": 0.5}
    assert result.mean_power_w == 650.0
    (row,) = (row for row in figure_rows(result) if row[0] == "power")
    assert row[1:3] == ("650", "W")
    assert "limit 700 W; SM clock 1,868 MHz (p5 1,766); throttled: power cap 50 % of samples" in row[3]
    assert result.joules_per_token is None  # without a configuration the number of GPUs is unknown


def test_energy_of_a_token_is_power_over_the_rate_of_a_gpu():
    reported = [replace(step, reported_tokens_per_s_per_gpu=13.0) for step in steps()]
    result = derive(None, [sample(16.0, 600.0), sample(17.0, 700.0, rank=1), *reported, OK], window=(6, 10))
    assert result.joules_per_token == 50.0
    assert ("energy", "50", "J/token") in [row[:3] for row in figure_rows(result)]


def test_serving_counts_samples_marked_as_measured():
    request = RequestDone(request=0, arrival=0.0, end=1.0, input_tokens=1, output_tokens=1)
    samples = [sample(1.0, 100.0, measured=False), sample(2.0, measured=True), sample(3.0, measured=True, rank=1)]
    telemetry = derive(None, [*samples, request, OK]).telemetry
    assert (telemetry.samples, telemetry.gpus, telemetry.power_w["mean"]) == (2, 2, 600.0)
    assert telemetry.throttled_fraction == 0.0
    assert telemetry.sampling_cpu_fraction is None


def test_cost_of_sampling_and_unknown_figures():
    samples = [sample(15.0 + n / 2, None, None, read_s=0.001) for n in range(5)]
    result = derive(None, [*samples, *steps(), OK], window=(5, 10))
    assert result.telemetry.sampling_cpu_fraction == pytest.approx(0.002)
    assert result.telemetry.power_w is result.telemetry.sm_clock_mhz is result.mean_power_w is None


def test_without_samples_it_is_null():
    result = derive(None, [*steps(), OK], window=(6, 10))
    assert result.telemetry is result.mean_power_w is None
    assert not [row for row in figure_rows(result) if row[0] == "power"]
