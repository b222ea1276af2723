"""Mean and 95 % confidence interval of each figure over repeated runs of one configuration.

Runs vary more than the steps or requests within one (clocks, placement, other load), so only repeats show how far apart
two configurations must be to differ. The interval is Student's: mean +- t x s / sqrt(n).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from llmb.perfmodel import metrics
from llmb.results.compare.student import student_quantile
from llmb.results.result import Result

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One figure over several runs."""

    metric: str
    n: int
    mean: float
    low: float
    high: float
    error: float  # half the interval / mean
    spread: float  # (largest - smallest) / mean


def interval(metric: str, samples: Sequence[float]) -> Interval | None:
    """Return the interval, or None for fewer than two samples or when one is not finite."""
    statistics = metrics.summarize(samples)
    if statistics is None or statistics.std is None or not statistics.mean:
        return None
    half = student_quantile(CONFIDENCE, statistics.n - 1) * statistics.std / sqrt(statistics.n)
    return Interval(
        metric=metric,
        n=statistics.n,
        mean=statistics.mean,
        low=statistics.mean - half
        if statistics.min < 0
        else max(0.0, statistics.mean - half),  # no rate or time is below zero
        high=statistics.mean + half,
        error=half / abs(statistics.mean),
        spread=(statistics.max - statistics.min) / abs(statistics.mean),
    )


def _mean_of(name: str) -> Callable[[Result], float | None]:
    return lambda result: (getattr(result, name) or {}).get("mean")


def _field(name: str) -> Callable[[Result], float | None]:
    return lambda result: getattr(result, name)


FIGURES: dict[str, Callable[[Result], float | None]] = {
    "step time (s, median)": lambda result: result.step_time_s.median if result.step_time_s else None,
    "tokens/s": _field("tokens_per_s"),
    "TFLOP/s per GPU": _field("tflops_per_gpu"),
    "requests/s": _field("request_throughput"),
    "output tokens/s, whole run": _field("output_tokens_per_s"),
    "output tokens/s, steady window": _field("steady_output_tokens_per_s"),
    "TTFT (ms, mean)": _mean_of("ttft_ms"),
    "TPOT (ms, mean)": _mean_of("tpot_ms"),
    "end to end (ms, mean)": _mean_of("e2e_ms"),
    "output speed (tokens/s, mean)": _field("output_speed_tokens_per_s"),
    "output tokens/J": _field("output_tokens_per_joule"),
}


def intervals(results: Sequence[Result]) -> list[Interval]:
    """Return an interval for every figure that all successful runs have; nothing for fewer than two runs."""
    good = [result for result in results if result.status == "ok"]
    estimates = []
    for metric, figure in FIGURES.items():
        samples = [value for value in map(figure, good) if value is not None]
        estimate = interval(metric, samples) if len(samples) == len(good) else None
        if estimate is not None:
            estimates.append(estimate)
    return estimates
