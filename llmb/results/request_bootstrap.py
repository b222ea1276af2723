"""Ratios of serving figures of two runs, with 95 % intervals by a block bootstrap over their requests.

    request_ratios(requests_a, requests_b) -> [RequestRatio(figure="output_tokens_per_s", ratio=1.08, ...), ...]

Requests that run at the same time share batches and waits, so they are not independent: resampling single requests
would give intervals that are too narrow. Requests are sorted by arrival and cut into at most 50 blocks of neighbours of
equal size, and blocks are resampled. Output tokens/s is (tokens / sum of E2E) x mean concurrency (Little's law), which
is exactly sum of n / T; resampling moves the first factor. Drift between runs (clocks, other load) is not in these
intervals: only repeated runs show it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from llmb.perfmodel import metrics
from llmb.perfmodel.metrics import TimedRequest
from llmb.results.compare.median_interval import MedianInterval

BLOCKS = 50
FEWEST_BLOCKS = 10  # for an interval
RESAMPLES = 1000
SEED = 1234  # the same runs always give the same verdict

Sums = tuple[float, float]  # numerator and denominator of a figure, over some requests


@dataclass(frozen=True, kw_only=True)
class RequestRatio:
    """A figure of B over that of A. The interval is None with too few requests."""

    figure: str  # a field of Result
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    higher_is_better: bool

    @property
    def differs(self) -> bool | None:
        """Whether the interval excludes 1; None without an interval."""
        return None if self.low is None or self.high is None else self.low > 1 or self.high < 1


def _mean(latency: Callable[[TimedRequest], float | None]) -> Callable[[TimedRequest], Sums]:
    def sums(request: TimedRequest) -> Sums:
        value = latency(request)
        return (0.0, 0.0) if value is None else (value, 1.0)

    return sums


def _tokens(request: TimedRequest) -> Sums:
    return float(request.output_tokens), (metrics.e2e_ms(request) or 0.0) / 1000


FIGURES: dict[str, tuple[Callable[[TimedRequest], Sums], bool]] = {  # sums of a request; whether higher is better
    "output_tokens_per_s": (_tokens, True),
    "ttft_ms": (_mean(metrics.ttft_ms), False),
    "tpot_ms": (_mean(metrics.tpot_ms), False),
    "e2e_ms": (_mean(metrics.e2e_ms), False),
}


def request_ratios(a: Sequence[TimedRequest], b: Sequence[TimedRequest]) -> list[RequestRatio]:
    """Return output tokens/s and mean TTFT, TPOT and E2E of B over A, as far as both runs have them."""
    whole_a, whole_b = metrics.throughput(a), metrics.throughput(b)
    if whole_a is None or whole_b is None:
        return []
    ratios = []
    for figure, (sums, higher_is_better) in FIGURES.items():
        rate = figure == "output_tokens_per_s"
        factor_a, factor_b = (whole_a.mean_concurrency, whole_b.mean_concurrency) if rate else (1.0, 1.0)
        blocks_a, blocks_b = _blocks(a, sums), _blocks(b, sums)
        value_a, value_b = _quotient(blocks_a), _quotient(blocks_b)
        if value_a and value_b:
            scale = factor_b / factor_a
            low, high = _interval(blocks_a, blocks_b, scale)
            ratios.append(
                RequestRatio(
                    figure=figure,
                    a=value_a * factor_a,
                    b=value_b * factor_b,
                    ratio=value_b / value_a * scale,
                    low=low,
                    high=high,
                    higher_is_better=higher_is_better,
                )
            )
    return ratios


def request_times(requests: Sequence[TimedRequest]) -> dict[str, MedianInterval]:
    """Return the time per output token of the whole load (s) and mean latencies (ms) of one run with intervals.

    The estimate is a mean, in the place of the median.
    """
    whole = metrics.throughput(requests)
    times = {}
    for figure, (sums, higher_is_better) in FIGURES.items() if whole is not None else ():
        blocks = _blocks(requests, sums)
        value = _quotient(blocks)
        if not value or whole is None:
            continue
        low, high = _interval(blocks, None, 1.0)
        if higher_is_better:  # output tokens/s
            scale = whole.mean_concurrency
            value, low, high = 1 / (value * scale), high and 1 / (high * scale), low and 1 / (low * scale)
        n = len(requests)
        times[figure] = MedianInterval(
            median=value, low=low, high=high, n=n, block=ceil(n / BLOCKS), blocks=len(blocks)
        )
    return times


def _blocks(requests: Sequence[TimedRequest], sums: Callable[[TimedRequest], Sums]) -> list[Sums]:
    """Return the sums of each block of neighbours; the last block may be smaller."""
    ordered = [sums(request) for request in sorted(requests, key=lambda request: request.arrival)]
    size = ceil(len(ordered) / BLOCKS)
    blocks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return [(sum(top for top, _ in block), sum(bottom for _, bottom in block)) for block in blocks]


def _quotient(blocks: Sequence[Sums]) -> float | None:
    top, bottom = sum(block[0] for block in blocks), sum(block[1] for block in blocks)
    return top / bottom if bottom > 0 else None


def _interval(a: list[Sums], b: list[Sums] | None, scale: float) -> tuple[float | None, float | None]:
    """Return the interval of B over A; without B that of A."""
    if len(a) < FEWEST_BLOCKS or (b is not None and len(b) < FEWEST_BLOCKS):
        return None, None
    chance = random.Random(SEED)
    pairs = ((a, b) for _ in range(2 * RESAMPLES)) if b is not None else (([(1.0, 1.0)], a) for _ in range(RESAMPLES))
    resampled = ((_quotient(chance.choices(x, k=len(x))), _quotient(chance.choices(y, k=len(y)))) for x, y in pairs)
    ratios = sorted(islice((y / x * scale for x, y in resampled if x and y), RESAMPLES))
    if len(ratios) < RESAMPLES:
        return None, None
    return metrics.percentile(ratios, 2.5), metrics.percentile(ratios, 97.5)
