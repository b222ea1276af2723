"""Metrics of a run: tokens/s, TFLOP/s per GPU, MFU, HFU, time to train, percentiles, latencies.

Plain numbers in, plain numbers out; the unit is in the name, utilizations are fractions (0.334 is 33.4 %). Unknown is
None: a missing, infinite or non-positive input never becomes an infinity, a zero or an exception.
Formulas, conventions and worked examples: docs/metrics.md.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, repeat
from math import fsum, hypot, isfinite, sqrt
from operator import mul, sub, truediv
from sys import float_info

from llmb.errors import ConfigError
from llmb.perfmodel.hardware import TERA
from llmb.perfmodel.samples.order_statistics import interpolate, percentiles
from llmb.perfmodel.samples.timed_requests import (
    TimedRequest,
    TimedRequests,
    elapsed_ms,
    output_times,
    time_per_token,
    without_nulls,
)

SECONDS_PER_DAY = 86_400
LATENCY_PERCENTILES = (25, 50, 75, 90, 95, 99)
LARGEST = float_info.max
STEADY_MIN_FRACTION = 0.1  # of the run; a shorter window is not representative
STEADY_MIN_REQUESTS = 2  # that must finish within it
FEW = 1000  # samples, that are looked at before all are
ENERGY_TOLERANCE = 0.05  # between two measurements of the same energy


def _quotient(numerator: Sequence[float | None], denominator: Sequence[float | None]) -> float | None:
    """Return product / product; None unless every factor is known, finite and positive."""
    value = 1.0
    for factor in numerator:
        if factor is None or not 0 < factor <= LARGEST:
            return None
        value *= factor
    for divisor in denominator:  # one by one: their product could underflow to zero
        if divisor is None or not 0 < divisor <= LARGEST:
            return None
        value /= divisor
    return value if isfinite(value) else None


# Training


def tokens_per_s(seqlen: int, gbs: int, step_time_s: float | None) -> float | None:
    """Return the tokens of one optimizer step over its time, all GPUs together."""
    return _quotient((seqlen, gbs), (step_time_s,))


def tokens_per_s_per_gpu(tokens_per_s: float | None, gpus: int | None) -> float | None:
    """Return tokens/s per GPU."""
    return _quotient((tokens_per_s,), (gpus,))


def tflops_per_gpu(flops_per_step: float | None, step_time_s: float | None, gpus: int | None) -> float | None:
    """Return the TFLOP/s of one GPU; from model FLOPs for MFU, from hardware FLOPs for HFU."""
    return _quotient((flops_per_step,), (step_time_s, gpus, TERA))


def mfu(tflops_per_gpu: float | None, peak_flops: float | None) -> float | None:
    """Return model FLOPs utilization (MFU), a fraction of `peak_flops` (FLOP/s of the dtype it is stated against)."""
    return _quotient((tflops_per_gpu, TERA), (peak_flops,))


def hfu(
    hardware_flops_per_step: float | None, step_time_s: float | None, gpus: int | None, peak_flops: float | None
) -> float | None:
    """Return hardware FLOPs utilization (HFU): like MFU, recomputation included."""
    return _quotient((hardware_flops_per_step,), (step_time_s, gpus, peak_flops))


def days_to_train(tokens: float, tokens_per_s: float | None) -> float | None:
    """Return the days to train on `tokens` at this rate, without interruptions."""
    return _quotient((tokens,), (tokens_per_s, SECONDS_PER_DAY))


# Samples


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Summary statistics, with the samples."""

    median: float
    mean: float
    std: float | None  # sample standard deviation (n - 1); null for one sample
    min: float
    max: float
    n: int
    samples: tuple[float, ...]


def percentile(samples: Iterable[float], q: float) -> float | None:
    """Return the q-th percentile, 0 to 100, interpolated linearly as in numpy; None without finite samples."""
    if not 0 <= q <= 100:
        raise ConfigError(f"a percentile is 0 to 100, got {q}")
    ranked = sorted(_finite(samples))
    return interpolate(ranked, q) if ranked else None


def summarize(samples: Iterable[float]) -> Statistics | None:
    """Return median, mean, standard deviation and range; None for no samples, or if one is not finite."""
    values = _finite(samples)
    median = percentile(values, 50)
    if median is None:
        return None
    mean = _mean(values)
    std = hypot(*(x - mean for x in values)) / sqrt(len(values) - 1) if len(values) > 1 else None
    if std is not None and not isfinite(std):
        return None
    return Statistics(
        median=median, mean=mean, std=std, min=min(values), max=max(values), n=len(values), samples=tuple(values)
    )


def latency_summary(samples: Iterable[float]) -> dict[str, float] | None:
    """Return mean, p25, p50, p75, p90, p95 and p99; None for no samples, or if one is not finite."""
    values = _finite(samples)
    if not values:
        return None
    return {"mean": _mean(values)} | {f"p{q}": value for q, value in percentiles(values, LATENCY_PERCENTILES).items()}


def _finite(samples: Iterable[float]) -> Sequence[float]:
    """Return the samples, or none at all if one is not finite: dropping only that one would hide it."""
    values = samples if isinstance(samples, array) else list(map(float, samples))
    return values if isfinite(sum(values)) or all(map(isfinite, values)) else []  # a sum takes a third of the time


def _mean(values: Sequence[float]) -> float:
    """Return the mean, never outside the range of the samples, and without overflow."""
    try:
        mean = fsum(values) / len(values)
    except OverflowError:
        mean = 2 * fsum(x / 2 / len(values) for x in values)
    some = values[:FEW]
    if min(some) <= mean <= max(some):  # nearly always, and then it is in the range of all
        return mean
    return min(max(mean, min(values)), max(values))


# Serving


def ttft_ms(request: TimedRequest) -> float | None:
    """Return the time to first token (TTFT), from arrival; None without streaming."""
    return elapsed_ms(request.arrival, request.first_token)


def e2e_ms(request: TimedRequest) -> float | None:
    """Return the end-to-end latency, from arrival to the last token."""
    return elapsed_ms(request.arrival, request.end)


def tpot_ms(request: TimedRequest) -> float | None:
    """Return the time per output token (TPOT) after the first: (E2E - TTFT) / (n - 1); None for fewer than 2 tokens."""
    return time_per_token(e2e_ms(request), ttft_ms(request), request.output_tokens)


def output_speeds(tpot_ms: Iterable[float]) -> Sequence[float]:
    """Return tokens/s/user after the first token: (n - 1) / (E2E - TTFT), the inverse of each TPOT."""
    return array("d", (1000.0 / gap for gap in tpot_ms if 0 < gap <= LARGEST and 1000.0 / gap <= LARGEST))


def user_throughputs(requests: Sequence[TimedRequest]) -> Sequence[float]:
    """Return tokens/s/user of requests, TTFT included: n / E2E."""
    timed = TimedRequests.of(requests)
    totals, tokens = timed.e2e_ms, timed.output_tokens
    if isinstance(totals, array) and min(totals, default=0.0) > 0 and min(tokens) > 0:
        speeds = array("d", map(truediv, map(mul, tokens, repeat(1000.0)), totals))
        if isfinite(sum(speeds)):
            return speeds
    return without_nulls([_quotient((output, 1000.0), (total,)) for output, total in zip(tokens, totals, strict=True)])


def itl_ms(request: TimedRequest) -> list[float]:
    """Return the inter-token latencies (ITL): gaps between successive chunks of the stream."""
    times = output_times(request)
    return [gap for a, b in pairwise(times) if _is_gap(gap := (b - a) * 1000.0)]


def _is_gap(milliseconds: float) -> bool:
    return 0 <= milliseconds <= LARGEST


def request_latencies_ms(requests: Sequence[TimedRequest]) -> dict[str, Sequence[float]]:
    """Return the samples of TTFT, TPOT and E2E, at most one per request."""
    timed = TimedRequests.of(requests)
    return {
        "ttft_ms": without_nulls(timed.ttft_ms),
        "tpot_ms": without_nulls(timed.tpot_ms),
        "e2e_ms": without_nulls(timed.e2e_ms),
    }


def pooled_itl_ms(requests: Sequence[TimedRequest]) -> Sequence[float]:
    """Return the gaps of all requests, as `itl_ms` has them."""
    timed = TimedRequests.of(requests)
    return timed.gaps_ms if timed.has_ordered_token_times else array("d", filter(_is_gap, timed.gaps_ms))


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates over the whole run, ramp-up and drain included."""

    duration_s: float  # last end - first arrival
    request_throughput: float  # requests/s
    output_tokens_per_s: float  # first tokens included
    total_tokens_per_s: float  # input and output
    mean_concurrency: float  # average concurrency, by Little's law


def throughput(requests: Sequence[TimedRequest]) -> Throughput | None:
    """Return the rates over T = max(end) - min(arrival); None if T is zero or a time is not finite."""
    timed = TimedRequests.of(requests)
    latencies = timed.e2e_ms
    if not latencies or (isinstance(latencies, list) and None in latencies):
        return None
    duration = max(timed.ends) - min(timed.arrivals)
    concurrency = _quotient((fsum(without_nulls(latencies)),), (duration, 1000))
    if concurrency is None:
        return None
    output = sum(timed.output_tokens)
    total = output + sum(timed.input_tokens)
    return Throughput(
        duration_s=duration,
        request_throughput=len(requests) / duration,
        output_tokens_per_s=output / duration,
        total_tokens_per_s=total / duration,
        mean_concurrency=concurrency,
    )


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """Rate while the engine is at full concurrency."""

    start_s: float
    end_s: float
    output_tokens_per_s: float


def steady_state(requests: Sequence[TimedRequest], whole: Throughput | None = None) -> SteadyState | None:
    """Return output tokens/s between ramp-up and drain.

    The window starts when as many requests have begun decoding as ever do so at once, and ends with the last first
    token: in between a finished request is replaced by another. Tokens count at their arrival. None if requests have
    no token times, if all of them were one wave, or if the window is too short to be representative. `whole`: their
    throughput, where it is known.
    """
    timed = TimedRequests.of(requests)
    whole = whole or throughput(timed)
    if whole is None or not isinstance(timed.first_tokens, array) or not all(r.token_times for r in requests):
        return None
    first_tokens, ends = sorted(timed.first_tokens), sorted(timed.ends)
    start, end = first_tokens[_max_concurrency(first_tokens, ends) - 1], first_tokens[-1]
    finished = bisect_right(ends, end) - bisect_right(ends, start)
    if end - start < STEADY_MIN_FRACTION * whole.duration_s or finished < STEADY_MIN_REQUESTS:
        return None
    in_order = timed.has_ordered_token_times
    tokens = fsum(_tokens_between(r, start, end, in_order) for r in requests)
    rate = _quotient((tokens,), (end - start,))
    return None if rate is None else SteadyState(start_s=start, end_s=end, output_tokens_per_s=rate)


def _max_concurrency(starts: Sequence[float], ends: Sequence[float]) -> int:
    """Return the largest number of requests at once, from sorted times; at equal ones an end counts before a start."""
    return max(1, max(map(sub, count(1), map(bisect_right, repeat(ends), starts)), default=1))


def _tokens_between(request: TimedRequest, start: float, end: float, in_order: bool) -> float:
    """Return the output tokens that arrived in (start, end]; chunks of several tokens count as equally large."""
    times = request.token_times
    if in_order and request.first_token == times[0] and start < times[0] and times[-1] <= end:  # nearly always
        return float(request.output_tokens)
    times = sorted(output_times(request))
    return (bisect_right(times, end) - bisect_right(times, start)) * request.output_tokens / len(times)


def issue_rate(requests: Sequence[TimedRequest]) -> float | None:
    """Return the request rate: intervals over the time from the first to the last arrival; None if all at once."""
    arrivals = TimedRequests.of(requests).arrivals
    return _quotient((len(arrivals) - 1,), (max(arrivals) - min(arrivals),)) if arrivals else None


def late_fraction(requests: Sequence[TimedRequest], concurrency: int) -> float | None:
    """Return the fraction of concurrency x T that was missing because requests were sent late.

    Until the last one is sent, `concurrency` requests (or all there are) should be running.
    """
    timed = TimedRequests.of(requests)
    whole = throughput(timed)
    if whole is None:
        return None
    target = min(concurrency, len(timed))
    first, last = min(timed.arrivals), max(timed.arrivals)
    running_s = fsum(map(sub, map(min, timed.ends, repeat(last)), timed.arrivals))
    return max(0.0, target * (last - first) - running_s) / (target * whole.duration_s)


def energies_agree(counted_joules: float | None, integrated_joules: float | None) -> bool | None:
    """Return whether the energy counter and the integral of sampled power agree; None without both."""
    ratio = _quotient((counted_joules,), (integrated_joules,))
    return None if ratio is None else abs(ratio - 1) <= ENERGY_TOLERANCE
