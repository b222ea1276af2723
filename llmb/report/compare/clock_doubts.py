"""Power, clocks and throttling as reasons to doubt a comparison: part of a difference may be theirs."""

from collections.abc import Iterator

from llmb.config.spec import RunConfig
from llmb.results.compare.speed_ratio import time_per_token
from llmb.results.result import Result

SAME_POWER = 0.05  # relative difference of mean power that is no reason for doubt
SAME_CLOCK = 0.01  # the same of the median SM clock, whose steps are 15 MHz on NVIDIA GPUs
SELDOM = 0.05  # fraction of samples in which throttling is no reason for doubt
USUAL_REASONS = {"power cap", "application clocks"}  # of a GPU at its limit or as it was set: its clock says it all

Run = tuple[RunConfig | None, Result]
Labels = tuple[str, str]


def clock_doubts(a: Run, b: Run, labels: Labels) -> Iterator[str]:
    """Yield one clause for each: power limits, mean power, clocks, throttling."""
    yield from _about_power(a[1], b[1], labels)
    yield from _about_clocks(a, b, labels)
    for label, (_, result) in zip(labels, (a, b), strict=True):
        reasons = result.telemetry.throttle_reasons if result.telemetry is not None else {}
        for reason, fraction in reasons.items():
            if reason not in USUAL_REASONS and fraction > SELDOM:
                yield f"{label} was throttled: {reason} in {100 * fraction:.0f} % of samples"


def _about_power(a: Result, b: Result, labels: Labels) -> Iterator[str]:
    limits = [r.telemetry.power_limit_w if r.telemetry is not None else None for r in (a, b)]
    if limits[0] and limits[1] and abs(limits[0] - limits[1]) >= 1:
        yield f"their power limits differ: {labels[0]} {limits[0]:.0f} W, {labels[1]} {limits[1]:.0f} W"
    power_a, power_b = a.mean_power_w, b.mean_power_w
    if power_a and power_b and abs(power_a - power_b) > SAME_POWER * max(power_a, power_b):
        advice = "" if all(limits) else "; look at power limits and clocks"
        yield (
            f"their GPUs drew different power: {labels[0]} {power_a:.0f} W, {labels[1]} {power_b:.0f} W on average"
            f"{advice}"
        )


def _about_clocks(a: Run, b: Run, labels: Labels) -> Iterator[str]:
    """Yield that clocks differ, and whether they explain a part of the difference in speed or hide one."""
    clocks = [median_clock(result) for _, result in (a, b)]
    times = [time_per_token(*run) for run in (a, b)]
    if not clocks[0] or not clocks[1] or abs(clocks[0] - clocks[1]) <= SAME_CLOCK * max(clocks[0], clocks[1]):
        return
    text = f"{labels[0]} ran at {clocks[0]:,.0f} MHz median, {labels[1]} at {clocks[1]:,.0f}"
    if not times[0] or not times[1]:
        yield text
    elif (clocks[0] > clocks[1]) == (times[0] < times[1]):
        yield f"{text}: part of the difference is the clock"
    else:
        yield f"{text}: at equal clocks the difference would be larger"


def median_clock(result: Result) -> float | None:
    """Return the median SM clock of its samples in MHz; None: unknown."""
    clock = result.telemetry.sm_clock_mhz if result.telemetry is not None else None
    return None if clock is None else clock["p50"]
