"""What a run achieved: tokens/s, TFLOP/s per GPU, MFU, HFU, MBU, time to train, percentiles, latencies.

Plain numbers in, plain numbers out; the unit is in the name, utilisations are fractions (0.334 is 33.4 %). What cannot
be known is None: a missing, infinite or not positive input never becomes an infinity, a zero or an exception.
Formulas, conventions and worked examples: docs/metrics.md.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum, hypot, isfinite, sqrt
from sys import float_info
from typing import Protocol

from llmb.errors import ConfigError
from llmb.perfmodel.hardware import TERA

SECONDS_PER_DAY = 86_400
LATENCY_PERCENTILES = (50, 90, 95, 99)
LARGEST = float_info.max
STEADY_SHARE = 0.1  # of the run; a shorter window stands for nothing
STEADY_REQUESTS = 2  # that must end within it
ENERGY_TOLERANCE = 0.05  # between two ways of measuring the same


def _quotient(above: Sequence[float | None], below: Sequence[float | None]) -> float | None:
    """Product of one side over the product of the other; None unless every factor is known, finite and positive."""
    value = 1.0
    for factor in above:
        if factor is None or not 0 < factor <= LARGEST:
            return None
        value *= factor
    for divisor in below:  # one by one: their product could underflow to zero
        if divisor is None or not 0 < divisor <= LARGEST:
            return None
        value /= divisor
    return value if isfinite(value) else None


# Training


def tokens_per_s(seqlen: int, gbs: int, step_time_s: float | None) -> float | None:
    """Tokens of one optimizer step over its time, all GPUs together."""
    return _quotient((seqlen, gbs), (step_time_s,))


def tokens_per_s_per_gpu(tokens_per_s: float | None, gpus: int | None) -> float | None:
    """The same, shared out evenly."""
    return _quotient((tokens_per_s,), (gpus,))


def tflops_per_gpu(flops_per_step: float | None, step_time_s: float | None, gpus: int | None) -> float | None:
    """TFLOP/s of one GPU; model FLOPs for MFU, hardware FLOPs for HFU."""
    return _quotient((flops_per_step,), (step_time_s, gpus, TERA))


def mfu(tflops_per_gpu: float | None, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation, a fraction of `peak_flops` (FLOP/s of the dtype that the figure is stated against)."""
    return _quotient((tflops_per_gpu, TERA), (peak_flops,))


def mfu_from_model_flops(
    gbs: int | None, model_flops: float | None, step_time_s: float | None, gpus: int | None, peak_flops: float | None
) -> float | None:
    """The same from the FLOPs of one sequence: gbs * model_flops / step time / GPUs / peak."""
    return _quotient((gbs, model_flops), (step_time_s, gpus, peak_flops))


def hfu(
    hardware_flops_per_step: float | None, step_time_s: float | None, gpus: int | None, peak_flops: float | None
) -> float | None:
    """Hardware FLOPs utilisation: as MFU, with what is computed twice counted twice."""
    return _quotient((hardware_flops_per_step,), (step_time_s, gpus, peak_flops))


def days_to_train(tokens: float, tokens_per_s: float | None) -> float | None:
    """Days for so many tokens at this rate, without interruptions."""
    return _quotient((tokens,), (tokens_per_s, SECONDS_PER_DAY))


# Samples


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """A summary that keeps what it summarises."""

    median: float
    mean: float
    std: float | None  # of a sample (n - 1); null with a single one
    min: float
    max: float
    n: int
    samples: tuple[float, ...]


def percentile(samples: Iterable[float], q: float) -> float | None:
    """The q-th percentile, 0 to 100, interpolated linearly between ranks as numpy does; None without finite samples."""
    if not 0 <= q <= 100:
        raise ConfigError(f"a percentile is 0 to 100, got {q}")
    ranked = sorted(_finite(samples))
    return _between_ranks(ranked, q) if ranked else None


def _between_ranks(ranked: Sequence[float], q: float) -> float:
    rank = (len(ranked) - 1) * q / 100
    low = min(int(rank), len(ranked) - 1)
    high = min(low + 1, len(ranked) - 1)
    share = rank - low
    value = ranked[low] * (1 - share) + ranked[high] * share
    return min(max(value, ranked[low]), ranked[high])  # rounding must not leave the two ranks


def describe(samples: Iterable[float]) -> Statistics | None:
    """Median, mean, spread and range; None for no samples, or when one of them is not finite."""
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
    """mean, p50, p90, p95 and p99; None for no samples, or when one of them is not finite."""
    ranked = sorted(_finite(samples))
    if not ranked:
        return None
    return {"mean": _mean(ranked)} | {f"p{q}": _between_ranks(ranked, q) for q in LATENCY_PERCENTILES}


def _finite(samples: Iterable[float]) -> list[float]:
    """The samples, or none at all when one is not finite: leaving that one out would hide it."""
    values = list(map(float, samples))
    return values if all(map(isfinite, values)) else []


def _mean(values: list[float]) -> float:
    """Never outside the samples, and never overflowing."""
    try:
        mean = fsum(values) / len(values)
    except OverflowError:
        mean = 2 * fsum(x / 2 / len(values) for x in values)
    return min(max(mean, min(values)), max(values))


# Serving


class Request(Protocol):
    """What a finished request must tell; times in seconds on one clock."""

    @property
    def arrival(self) -> float: ...
    @property
    def first_token(self) -> float | None: ...
    @property
    def token_times(self) -> Sequence[float]: ...
    @property
    def end(self) -> float: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


def ttft_ms(request: Request) -> float | None:
    """Time to first token, from arrival; None when the answer was not streamed."""
    return None if request.first_token is None else _elapsed_ms(request.arrival, request.first_token)


def e2e_ms(request: Request) -> float | None:
    """From arrival to the last token."""
    return _elapsed_ms(request.arrival, request.end)


def tpot_ms(request: Request) -> float | None:
    """Time per output token after the first: (E2E - TTFT) / (n - 1); None for fewer than two tokens."""
    total, first = e2e_ms(request), ttft_ms(request)
    if total is None or first is None or request.output_tokens < 2 or total < first:
        return None
    return (total - first) / (request.output_tokens - 1)


def output_speed(request: Request) -> float | None:
    """Tokens/s one user sees once the answer has begun: (n - 1) / (E2E - TTFT)."""
    return _quotient((1000.0,), (tpot_ms(request),))


def user_throughput(request: Request) -> float | None:
    """Tokens/s one user gets, waiting for the first included: n / E2E."""
    return _quotient((request.output_tokens, 1000.0), (e2e_ms(request),))


def itl_ms(request: Request) -> list[float]:
    """Inter-token latencies: the gaps between successive arrivals of the stream, whatever each one carried."""
    gaps = ((b - a) * 1000.0 for a, b in pairwise(_arrivals(request)))
    return [gap for gap in gaps if 0 <= gap <= LARGEST]


def _arrivals(request: Request) -> list[float]:
    """When something of the answer came, the first token included once."""
    times = list(request.token_times)
    if request.first_token is not None and times and request.first_token < times[0]:
        times.insert(0, request.first_token)
    return times


def latencies_ms(requests: Sequence[Request]) -> dict[str, list[float]]:
    """The samples of each latency; TTFT, TPOT and E2E one a request at most, ITL pooled over all gaps."""
    one_each = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms}
    samples = {
        name: [value for value in map(latency, requests) if value is not None] for name, latency in one_each.items()
    }
    return samples | {"itl_ms": [gap for request in requests for gap in itl_ms(request)]}


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates over the whole span, ramp-up and drain included."""

    duration_s: float  # last end - first arrival
    request_throughput: float  # requests/s
    output_tokens_per_s: float  # first tokens included
    total_tokens_per_s: float  # input and output
    mean_in_flight: float  # requests at once on average, by Little's law


def throughput(requests: Sequence[Request]) -> Throughput | None:
    """Rates of these requests over T = max(end) - min(arrival); None when no time passed or a time is not finite."""
    spans = [e2e_ms(r) for r in requests]
    if not spans or any(span is None for span in spans):
        return None
    duration = float(max(r.end for r in requests) - min(r.arrival for r in requests))
    in_flight = _quotient((fsum(span or 0.0 for span in spans),), (duration, 1000))
    if in_flight is None:
        return None
    output, both = sum(r.output_tokens for r in requests), sum(r.input_tokens + r.output_tokens for r in requests)
    return Throughput(
        duration_s=duration,
        request_throughput=len(requests) / duration,
        output_tokens_per_s=output / duration,
        total_tokens_per_s=both / duration,
        mean_in_flight=in_flight,
    )


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The rate while the engine is full."""

    start_s: float
    end_s: float
    output_tokens_per_s: float


def steady(requests: Sequence[Request]) -> Steady | None:
    """Output tokens/s from when as many answers have begun as ever go on at once until the last one begins.

    Before that the first wave is being read, after it the engine drains; in between every request that ends makes room
    for another. Tokens count at their own arrival. None when answers carry no times, when all requests were one wave,
    or when the window is too short to stand for anything.
    """
    whole = throughput(requests)
    begun = sorted(r.first_token for r in requests if r.first_token is not None)
    if whole is None or len(begun) < len(requests) or not all(r.token_times for r in requests):
        return None
    start, end = begun[_most_at_once(requests) - 1], begun[-1]
    finished = sum(start < r.end <= end for r in requests)
    if end - start < STEADY_SHARE * whole.duration_s or finished < STEADY_REQUESTS:
        return None
    tokens = fsum(_tokens_between(r, start, end) for r in requests)
    rate = _quotient((tokens,), (end - start,))
    return None if rate is None else Steady(start_s=start, end_s=end, output_tokens_per_s=rate)


def _most_at_once(requests: Sequence[Request]) -> int:
    """The largest number of answers that go on at the same time; an end makes room for a beginning at that moment."""
    changes = [(r.first_token, 1) for r in requests if r.first_token is not None] + [(r.end, -1) for r in requests]
    return max(1, *accumulate(change for _, change in sorted(changes)))


def _tokens_between(request: Request, start: float, end: float) -> float:
    """Output tokens that came after `start` and not after `end`; arrivals that carry several carry equally many."""
    times = sorted(_arrivals(request))
    return (bisect_right(times, end) - bisect_right(times, start)) * request.output_tokens / len(times)


def issue_rate(requests: Sequence[Request]) -> float | None:
    """Requests/s at which they were sent: intervals over the time from the first to the last; None for all at once."""
    arrivals = [r.arrival for r in requests]
    return _quotient((len(arrivals) - 1,), (max(arrivals) - min(arrivals),)) if arrivals else None


def late_share(requests: Sequence[Request], concurrency: int) -> float | None:
    """How much of the load asked for was missing because requests were sent late: a share of concurrency x T.

    Until the last one is sent, as many as `concurrency` (or all there are) should be in flight.
    """
    whole = throughput(requests)
    if whole is None:
        return None
    asked = min(concurrency, len(requests))
    first, last = min(r.arrival for r in requests), max(r.arrival for r in requests)
    in_flight_s = fsum(min(r.end, last) - r.arrival for r in requests)
    return max(0.0, asked * (last - first) - in_flight_s) / (asked * whole.duration_s)


def energies_agree(counted_joules: float | None, integrated_joules: float | None) -> bool | None:
    """Whether a device's energy counter and the integral of its sampled power tell the same; None without both."""
    ratio = _quotient((counted_joules,), (integrated_joules,))
    return None if ratio is None else abs(ratio - 1) <= ENERGY_TOLERANCE


def mbu(bytes_per_step: float | None, step_time_s: float | None, memory_bandwidth: float | None) -> float | None:
    """Memory-bandwidth utilisation of one GPU while decoding: bytes it must read a step over time and peak bytes/s."""
    return _quotient((bytes_per_step,), (step_time_s, memory_bandwidth))


def _elapsed_ms(start: float, end: float) -> float | None:
    elapsed = (end - start) * 1000.0
    return elapsed if isfinite(elapsed) and elapsed >= 0 else None
