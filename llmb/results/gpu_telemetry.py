"""Power, clocks, temperature and throttling of a run's GPUs over its measured interval, from GpuSample events.

gpu_telemetry(events, measured_interval(steps)) -> GpuTelemetry(power_w={"mean": 688.0, ...}, ...)
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from llmb.events import Event, GpuSample, StepDone
from llmb.perfmodel.metrics import percentile
from llmb.results.recorded_events import events_of
from llmb.results.result import GpuTelemetry

PERCENTILES = (5, 50, 95)
NOT_THROTTLED = {"idle"}  # clocks are low because there is nothing to do
Interval = tuple[float, float]  # seconds since 1970


def measured_interval(steps: Sequence[StepDone]) -> Interval | None:
    """Return when the measured steps began and ended; None: a log does not say."""
    if not steps:
        return None
    first, last = steps[0], steps[-1]
    if first.time is None or first.seconds is None or last.time is None:
        return None
    return first.time - first.seconds, last.time


def measured_samples(events: Iterable[Event], interval: Interval | None) -> list[GpuSample]:
    """Return the samples of the measured interval, as their recorder says or as the times of steps do."""
    samples = events_of(events, GpuSample)
    return [
        s for s in samples if s.measured or (s.measured is None and interval and interval[0] <= s.time <= interval[1])
    ]


def gpu_telemetry(events: Iterable[Event], interval: Interval | None) -> GpuTelemetry | None:
    """Return the summary over the samples of all GPUs; None without any."""
    samples = measured_samples(events, interval)
    if not samples:
        return None
    reasons = Counter(r for s in samples for r in s.throttle_reasons if r not in NOT_THROTTLED)
    limits = [s.power_limit_w for s in samples if s.power_limit_w is not None]
    return GpuTelemetry(
        samples=len(samples),
        gpus=len({s.rank for s in samples}),
        power_w=_summary(s.power_w for s in samples),
        power_limit_w=min(limits, default=None),
        sm_clock_mhz=_summary(s.sm_clock_mhz for s in samples),
        temperature_c=_summary(s.temperature_c for s in samples),
        throttled_fraction=sum(not NOT_THROTTLED.issuperset(s.throttle_reasons) for s in samples) / len(samples),
        throttle_reasons={reason: count / len(samples) for reason, count in reasons.most_common()},
        sampling_cpu_fraction=_sampling_cost(samples),
    )


def _summary(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean, p5, p50 and p95; None if the driver says none."""
    ranked = sorted(value for value in values if value is not None)
    if not ranked:
        return None
    percentiles = ((f"p{q}", percentile(ranked, q)) for q in PERCENTILES)
    return {"mean": sum(ranked) / len(ranked)} | {name: value for name, value in percentiles if value is not None}


def _sampling_cost(samples: Iterable[GpuSample]) -> float | None:
    """Return the CPU time of reading over the sampled time, the mean over ranks."""
    by_rank: dict[int, list[GpuSample]] = {}
    for sample in samples:
        by_rank.setdefault(sample.rank, []).append(sample)
    costs = []
    for first, *later in by_rank.values():
        if later and later[-1].time > first.time:
            costs.append(sum(sample.read_s or 0.0 for sample in later) / (later[-1].time - first.time))
    return sum(costs) / len(costs) if costs else None
