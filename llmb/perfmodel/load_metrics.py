"""Metrics of a load on a server: latencies from the scheduled time, goodput, intervals, cache hit rates, cost.

Plain numbers in, plain numbers out, as in metrics.py. Definitions and worked examples: docs/metrics.md.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import ceil, floor, fsum, isfinite, sqrt
from operator import sub
from typing import Protocol

from llmb.config.serialization import whole_number
from llmb.perfmodel import metrics
from llmb.perfmodel.samples.order_statistics import order_statistics
from llmb.perfmodel.samples.timed_requests import TimedRequest, TimedRequests

Z_95 = 1.96  # two-sided 95 % quantile of the normal distribution
GOLDEN_RATIO = 0.6180339887498949  # its multiples modulo 1 fill the interval evenly in any order
MOVED_LIMIT = 0.02  # of a percentile, that the client itself may cause


class ScheduledRequest(TimedRequest, Protocol):
    """A request with the time at which it was due."""

    @property
    def scheduled(self) -> float | None: ...


class LatencyLimits(Protocol):
    """Limits of a service-level objective; None: no limit."""

    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def itl_ms(self) -> float | None: ...
    @property
    def e2e_ms(self) -> float | None: ...


def waiting_ms(request: ScheduledRequest) -> float:
    """Return how long after its time a request was sent; 0 for one without a time."""
    return 0.0 if request.scheduled is None else max(0.0, (request.arrival - request.scheduled) * 1000.0)


def scheduled_ttft_ms(request: ScheduledRequest) -> float | None:
    """Return the time to first token from the scheduled time."""
    ttft = metrics.ttft_ms(request)
    return None if ttft is None else ttft + waiting_ms(request)


def scheduled_e2e_ms(request: ScheduledRequest) -> float | None:
    """Return the end-to-end latency from the scheduled time."""
    total = metrics.e2e_ms(request)
    return None if total is None else total + waiting_ms(request)


def scheduled_user_throughput(request: ScheduledRequest) -> float | None:
    """Return tokens/s/user with all waiting included: n / E2E from the scheduled time."""
    total = scheduled_e2e_ms(request)
    return 1000.0 * request.output_tokens / total if total and request.output_tokens else None


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Rates of the requests that hold every limit."""

    requests_per_s: float
    tokens_per_s: float  # output
    fraction: float  # of all requests, failed ones included


def goodput(
    completed: Sequence[ScheduledRequest], failed: int, limits: LatencyLimits, duration_s: float | None
) -> Goodput | None:
    """Return goodput over the duration of the whole run; None without requests or duration."""
    total = len(completed) + failed
    if not total or not duration_s or duration_s <= 0:
        return None
    good = [request for request in completed if holds(request, limits)]
    return Goodput(
        requests_per_s=len(good) / duration_s,
        tokens_per_s=sum(request.output_tokens for request in good) / duration_s,
        fraction=len(good) / total,
    )


def holds(request: ScheduledRequest, limits: LatencyLimits) -> bool:
    """Return whether a request holds all limits; TTFT and E2E count from its scheduled time.

    A limit on the first token fails where none was seen; a limit on what one token does not have (TPOT, ITL) holds.
    """
    if limits.ttft_ms is not None:
        ttft = scheduled_ttft_ms(request)
        if ttft is None or ttft > limits.ttft_ms:
            return False
    total = scheduled_e2e_ms(request)
    if limits.e2e_ms is not None and (total is None or total > limits.e2e_ms):
        return False
    tpot = metrics.tpot_ms(request)
    if limits.tpot_ms is not None and tpot is not None and tpot > limits.tpot_ms:
        return False
    return limits.itl_ms is None or max(metrics.itl_ms(request), default=0.0) <= limits.itl_ms


def latency_intervals(samples: Iterable[float]) -> dict[str, tuple[float, float]] | None:
    """Return 95 % intervals of mean and percentiles over requests; None for fewer than two samples.

    Percentiles have order-statistic (binomial) intervals, to which a bootstrap over requests converges, where there
    are enough samples beyond them; the mean has a normal one.
    """
    values = array("d", samples)
    n = len(values)
    if n < 2 or not all(map(isfinite, values)):
        return None
    mean = fsum(values) / n
    half = Z_95 * sqrt(fsum(map(pow, map(sub, values, repeat(mean)), repeat(2))) / (n - 1) / n)
    ranks: dict[str, tuple[int, int]] = {}
    for q in metrics.LATENCY_PERCENTILES:
        p = q / 100
        spread = Z_95 * sqrt(n * p * (1 - p))
        low, high = floor(n * p - spread) - 1, ceil(n * p + spread)
        if low >= 0 and high < n:
            ranks[f"p{q}"] = (low, high)
    ranked = order_statistics(values, {rank for interval in ranks.values() for rank in interval})
    intervals = {name: (ranked[low], ranked[high]) for name, (low, high) in ranks.items()}
    return {"mean": (max(0.0, mean - half), mean + half)} | intervals


def cost_per_million(cost_per_hour: float | None, gpus: int | None, tokens_per_s: float | None) -> float | None:
    """Return the cost of a million tokens at this rate; `cost_per_hour` of one GPU."""
    if not cost_per_hour or not gpus or not tokens_per_s:
        return None
    return cost_per_hour * gpus / 3600 / tokens_per_s * 1e6


def joules_per_million(joules: float | None, tokens: int | None) -> float | None:
    """Return the energy of a million tokens."""
    return joules / tokens * 1e6 if joules and tokens else None


def moved_percentile(
    requests: Sequence[ScheduledRequest], lag_ms: dict[str, float] | None, has_cap: bool
) -> tuple[str, float] | None:
    """Return the percentile that the client's own delays move most, and by which fraction; None: nothing is known.

    Two delays are seen: requests sent after their time (not where a cap holds them back on purpose), and time stamps
    taken after bytes were there, as late as the event loop was. Lags are spread over requests independently of them.
    """
    streamed = any(request.first_token is not None for request in requests)
    timed = TimedRequests.of(requests)
    latencies, name = (timed.ttft_ms, "TTFT") if streamed else (timed.e2e_ms, "E2E")
    values, delayed, points = array("d"), array("d"), lag_points(lag_ms or {})
    waits = repeat(0.0) if has_cap else map(waiting_ms, requests)
    for number, (value, wait) in enumerate(zip(latencies, waits, strict=False)):
        if value is not None:
            values.append(value)
            delayed.append(value + wait + interpolate_lag(points, number * GOLDEN_RATIO % 1))
    measured, moved = metrics.latency_summary(values), metrics.latency_summary(delayed)
    if measured is None or moved is None:
        return None
    shifts = {key: moved[key] / measured[key] - 1 for key in measured if measured[key] > 0}
    if not shifts:
        return None
    worst = max(shifts, key=lambda key: shifts[key])
    return f"{name} {worst}", shifts[worst]


def lag_points(lag_ms: dict[str, float]) -> list[tuple[float, float]]:
    """Return the known percentiles as (fraction, lag), from 0 on."""
    points = [(0.0, 0.0)]
    for name, lag in lag_ms.items():
        percent = whole_number(name.removeprefix("p")) if name.startswith("p") else None
        if percent is not None and 0 < percent <= 100:
            points.append((percent / 100, lag))
    return sorted(points)


def interpolate_lag(points: list[tuple[float, float]], fraction: float) -> float:
    """Return the lag below which this fraction of all lags is."""
    index = bisect_left(points, (fraction,), 1)
    if index == len(points):
        return points[-1][1]
    (low, low_lag), (high, high_lag) = points[index - 1 : index + 1]
    return low_lag + (high_lag - low_lag) * (fraction - low) / (high - low)
