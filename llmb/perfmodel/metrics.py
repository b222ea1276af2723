"""Metrics of a run: tokens/s, TFLOP/s per GPU, MFU, HFU, MBU, time to train, percentiles, latencies.

Plain numbers in, plain numbers out; the unit is in the name, utilizations are fractions (0.334 is 33.4 %). Unknown is
None: a missing, infinite or non-positive input never becomes an infinity, a zero or an exception.
Formulas, conventions and worked examples: docs/metrics.md.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise, repeat
from math import fsum, hypot, isfinite, sqrt
from operator import mul, sub
from random import Random
from sys import float_info
from typing import Protocol

from llmb.errors import ConfigError
from llmb.perfmodel.hardware import TERA

SECONDS_PER_DAY = 86_400
LATENCY_PERCENTILES = (25, 50, 75, 90, 95, 99)
LARGEST = float_info.max
STEADY_MIN_FRACTION = 0.1  # of the run; a shorter window is not representative
STEADY_MIN_REQUESTS = 2  # that must finish within it
REQUESTS_AT_ONCE = 10_000  # of which gaps are computed: a second copy of all would need as much memory
FEW = 1000  # samples, that are looked at before all are
MOST_SORTED = 200_000  # samples; of more, percentiles are selected
SAMPLE = 50_000  # of them, that tells where a percentile lies
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
    return _interpolate(ranked, q) if ranked else None


def _interpolate(ranked: Sequence[float], q: float) -> float:
    rank = (len(ranked) - 1) * q / 100
    low = min(int(rank), len(ranked) - 1)
    high = min(low + 1, len(ranked) - 1)
    fraction = rank - low
    value = ranked[low] * (1 - fraction) + ranked[high] * fraction
    return min(max(value, ranked[low]), ranked[high])  # rounding must not leave the interval


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
    return {"mean": _mean(values)} | {f"p{q}": value for q, value in _percentiles(values, LATENCY_PERCENTILES).items()}


def _percentiles(values: Sequence[float], percents: Sequence[int]) -> dict[int, float]:
    """Return several percentiles; of many values by selection, which needs no sorted copy of them."""
    if len(values) <= MOST_SORTED:
        ranked = sorted(values)
        return {q: _interpolate(ranked, q) for q in percents}
    positions = {q: (len(values) - 1) * q / 100 for q in percents}
    lows = {int(position) for position in positions.values()}
    ranked_values = _order_statistics(values, lows | {min(low + 1, len(values) - 1) for low in lows})
    return {
        q: _interpolate(
            [ranked_values[int(position)], ranked_values[min(int(position) + 1, len(values) - 1)]], 100 * (position % 1)
        )
        for q, position in positions.items()
    }


def _order_statistics(values: Sequence[float], ranks: Iterable[int]) -> dict[int, float]:
    """Return the values of some ranks, from 0, without sorting all: a sample tells between which values each rank lies,
    and only values of cells with a rank that is asked for are sorted. Exact whatever the sample: it only saves work."""
    chosen_ranks = sorted(set(ranks))
    sample = sorted(Random(0).choices(values, k=SAMPLE))  # at random: every 60th gap may be the 4th of each request
    cuts = _bracketing_cuts(sample, [rank / len(values) for rank in chosen_ranks])
    cells = bytes(map(bisect_left, repeat(cuts), values))  # of each value
    starts = [0, *accumulate(cells.count(cell) for cell in range(len(cuts) + 1))]  # rank of the first value of a cell
    cell_of = {rank: bisect_right(starts, rank) - 1 for rank in chosen_ranks}
    chosen = sorted(set(cell_of.values()))
    is_chosen = bytes(cell in chosen for cell in range(256))
    members = sorted(compress(values, cells.translate(is_chosen)))  # of one chosen cell after the other
    sizes = (starts[cell + 1] - starts[cell] for cell in chosen[:-1])
    before = dict(zip(chosen, accumulate(sizes, initial=0), strict=True))  # members of the chosen cells before each
    return {rank: members[before[cell] + rank - starts[cell]] for rank, cell in cell_of.items()}


def _bracketing_cuts(sample: Sequence[float], fractions: Iterable[float]) -> list[float]:
    """Return values below and above each fraction of a sorted sample, four standard errors of its rank away."""
    n, cuts = len(sample), set()
    for fraction in fractions:
        margin = 4 * sqrt(n * fraction * (1 - fraction)) + 1
        cuts |= {sample[max(0, int(n * fraction - margin))], sample[min(n - 1, int(n * fraction + margin) + 1)]}
    return sorted(cuts)


def _finite(samples: Iterable[float]) -> Sequence[float]:
    """Return the samples, or none at all if one is not finite: dropping only that one would hide it."""
    values = samples if isinstance(samples, array) else list(map(float, samples))
    return values if all(map(isfinite, values)) else []


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


class TimedRequest(Protocol):
    """Timestamps and token counts of a finished request; times in seconds on one clock."""

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


def ttft_ms(request: TimedRequest) -> float | None:
    """Return the time to first token (TTFT), from arrival; None without streaming."""
    return None if request.first_token is None else _elapsed_ms(request.arrival, request.first_token)


def e2e_ms(request: TimedRequest) -> float | None:
    """Return the end-to-end latency, from arrival to the last token."""
    return _elapsed_ms(request.arrival, request.end)


def tpot_ms(request: TimedRequest) -> float | None:
    """Return the time per output token (TPOT) after the first: (E2E - TTFT) / (n - 1); None for fewer than 2 tokens."""
    return _time_per_token(e2e_ms(request), ttft_ms(request), request.output_tokens)


def _time_per_token(total_ms: float | None, first_ms: float | None, tokens: int) -> float | None:
    if total_ms is None or first_ms is None or tokens < 2 or total_ms < first_ms:
        return None
    return (total_ms - first_ms) / (tokens - 1)


def output_speeds(tpot_ms: Iterable[float]) -> Sequence[float]:
    """Return tokens/s/user after the first token: (n - 1) / (E2E - TTFT), the inverse of each TPOT."""
    return array("d", (1000.0 / gap for gap in tpot_ms if 0 < gap <= LARGEST and 1000.0 / gap <= LARGEST))


def user_throughputs(requests: Iterable[TimedRequest]) -> Sequence[float]:
    """Return tokens/s/user of requests, TTFT included: n / E2E."""
    speeds = (_quotient((request.output_tokens, 1000.0), (e2e_ms(request),)) for request in requests)
    return array("d", (speed for speed in speeds if speed is not None))


def itl_ms(request: TimedRequest) -> list[float]:
    """Return the inter-token latencies (ITL): gaps between successive chunks of the stream."""
    times = _arrivals(request)
    return [gap for a, b in pairwise(times) if _is_gap(gap := (b - a) * 1000.0)]


def _is_gap(milliseconds: float) -> bool:
    return 0 <= milliseconds <= LARGEST


def _arrivals(request: TimedRequest) -> Sequence[float]:
    """Return the arrival times of output chunks, with the first token once."""
    times = request.token_times
    if request.first_token is not None and times and request.first_token < times[0]:
        return [request.first_token, *times]
    return times


def request_latencies_ms(requests: Sequence[TimedRequest]) -> dict[str, Sequence[float]]:
    """Return the samples of TTFT, TPOT and E2E, at most one per request."""
    firsts, gaps, totals = array("d"), array("d"), array("d")
    for request in requests:  # in one pass: there may be a million of them
        total, first = e2e_ms(request), ttft_ms(request)
        gap = _time_per_token(total, first, request.output_tokens)
        if first is not None:
            firsts.append(first)
        if gap is not None:
            gaps.append(gap)
        if total is not None:
            totals.append(total)
    return {"ttft_ms": firsts, "tpot_ms": gaps, "e2e_ms": totals}


def pooled_itl_ms(requests: Sequence[TimedRequest]) -> Sequence[float]:
    """Return the gaps of all requests, as `itl_ms` has them."""
    gaps = array("d")
    for first in range(0, len(requests), REQUESTS_AT_ONCE):
        seconds = array("d")
        for request in requests[first : first + REQUESTS_AT_ONCE]:
            times = _arrivals(request)
            seconds.extend(map(sub, times[1:], times))
        some = array("d", map(mul, seconds, repeat(1000.0)))
        is_plain = isfinite(sum(some)) and min(some, default=0.0) >= 0  # nearly always
        gaps.extend(some if is_plain else array("d", filter(_is_gap, some)))
    return gaps


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
    latencies = [e2e_ms(r) for r in requests]
    if not latencies or any(latency is None for latency in latencies):
        return None
    duration = float(max(r.end for r in requests) - min(r.arrival for r in requests))
    concurrency = _quotient((fsum(latency or 0.0 for latency in latencies),), (duration, 1000))
    if concurrency is None:
        return None
    output, total = sum(r.output_tokens for r in requests), sum(r.input_tokens + r.output_tokens for r in requests)
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
    whole = whole or throughput(requests)
    first_tokens = sorted(r.first_token for r in requests if r.first_token is not None)
    if whole is None or len(first_tokens) < len(requests) or not all(r.token_times for r in requests):
        return None
    start, end = first_tokens[_max_concurrency(requests) - 1], first_tokens[-1]
    finished = sum(start < r.end <= end for r in requests)
    if end - start < STEADY_MIN_FRACTION * whole.duration_s or finished < STEADY_MIN_REQUESTS:
        return None
    tokens = fsum(_tokens_between(r, start, end) for r in requests)
    rate = _quotient((tokens,), (end - start,))
    return None if rate is None else SteadyState(start_s=start, end_s=end, output_tokens_per_s=rate)


def _max_concurrency(requests: Sequence[TimedRequest]) -> int:
    """Return the largest number of requests in decode at once; at equal times an end counts before a start."""
    starts, ends = sorted(r.first_token for r in requests if r.first_token is not None), sorted(r.end for r in requests)
    running = (begun - bisect_right(ends, start) for begun, start in enumerate(starts, start=1))
    return max(1, max(running, default=1))


def _tokens_between(request: TimedRequest, start: float, end: float) -> float:
    """Return the output tokens that arrived in (start, end]; chunks of several tokens count as equally large."""
    times = sorted(_arrivals(request))
    return (bisect_right(times, end) - bisect_right(times, start)) * request.output_tokens / len(times)


def issue_rate(requests: Sequence[TimedRequest]) -> float | None:
    """Return the request rate: intervals over the time from the first to the last arrival; None if all at once."""
    arrivals = [r.arrival for r in requests]
    return _quotient((len(arrivals) - 1,), (max(arrivals) - min(arrivals),)) if arrivals else None


def late_fraction(requests: Sequence[TimedRequest], concurrency: int) -> float | None:
    """Return the fraction of concurrency x T that was missing because requests were sent late.

    Until the last one is sent, `concurrency` requests (or all there are) should be running.
    """
    whole = throughput(requests)
    if whole is None:
        return None
    target = min(concurrency, len(requests))
    first, last = min(r.arrival for r in requests), max(r.arrival for r in requests)
    running_s = fsum(min(r.end, last) - r.arrival for r in requests)
    return max(0.0, target * (last - first) - running_s) / (target * whole.duration_s)


def energies_agree(counted_joules: float | None, integrated_joules: float | None) -> bool | None:
    """Return whether the energy counter and the integral of sampled power agree; None without both."""
    ratio = _quotient((counted_joules,), (integrated_joules,))
    return None if ratio is None else abs(ratio - 1) <= ENERGY_TOLERANCE


def mbu(bytes_per_step: float | None, step_time_s: float | None, memory_bandwidth: float | None) -> float | None:
    """Return memory-bandwidth utilization (MBU) of one GPU in decode: bytes per step / step time / peak bytes/s."""
    return _quotient((bytes_per_step,), (step_time_s, memory_bandwidth))


def _elapsed_ms(start: float, end: float) -> float | None:
    elapsed = (end - start) * 1000.0
    return elapsed if isfinite(elapsed) and elapsed >= 0 else None
