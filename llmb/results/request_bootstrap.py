"""Ratios of serving figures of two runs, with 95 % intervals by a block bootstrap over their requests.

    request_ratios(requests_a, requests_b) -> [RequestRatio(figure="output_tokens_per_s", ratio=1.08, ...), ...]

Requests that run at the same time share batches and waits, so they are not independent: resampling single requests
would give intervals that are too narrow. Requests are sorted by arrival and cut into blocks of neighbours, as long as
the autocorrelation of the figure requires (`block_length`, as for steps), and blocks are resampled. Of more than 1,000
requests means of neighbours enter the autocorrelation, so that its 50 lags reach as far as in a short run.
Output tokens/s is (tokens / sum of E2E) x mean concurrency (Little's law), which is exactly sum of n / T; resampling
moves the first factor. Drift between runs (clocks, other load) is not in these intervals: only repeated runs show it.

Sorting takes O(n log n) time; everything else is linear, in arrays of two numbers per request.
"""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from operator import attrgetter
from statistics import median

from llmb.perfmodel import metrics
from llmb.perfmodel.samples.timed_requests import Column, TimedRequest, TimedRequests
from llmb.results.compare.median_interval import (
    MOST_BLOCKS,
    MedianInterval,
    block_length,
    few_blocks_factor,
    ratio_of,
)

FEWEST_REQUESTS = 10  # for an interval
FEWEST_BLOCKS = 5
CELLS = 1000  # of neighbouring requests, whose means show the autocorrelation of a long run
RESAMPLES = 1000
SEED = 1234  # the same runs always give the same verdict

Sums = tuple[float, float]  # numerator and denominator of a figure, over some requests
Columns = tuple[Sequence[float], Sequence[float]]  # numerators and denominators of single requests


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
    blocks: tuple[tuple[int, int], tuple[int, int]]  # of A and B: how many were resampled, of how many requests each

    @property
    def differs(self) -> bool | None:
        """True if the interval excludes 1; None without an interval."""
        return None if self.low is None or self.high is None else self.low > 1 or self.high < 1


def _tokens(requests: TimedRequests) -> Columns:
    seconds = (0.0 if value is None else value / 1000 for value in requests.e2e_ms)
    return array("d", requests.output_tokens), array("d", seconds)


def _mean(values: Column) -> Columns:
    if isinstance(values, array):
        return values, array("d", [1.0]) * len(values)
    return array("d", (value or 0.0 for value in values)), array("d", (value is not None for value in values))


# Columns of requests; whether higher is better.
FIGURES: dict[str, tuple[Callable[[TimedRequests], Columns], bool]] = {
    "output_tokens_per_s": (_tokens, True),
    "ttft_ms": (lambda requests: _mean(requests.ttft_ms), False),
    "tpot_ms": (lambda requests: _mean(requests.tpot_ms), False),
    "e2e_ms": (lambda requests: _mean(requests.e2e_ms), False),
}


def request_ratios(a: Sequence[TimedRequest], b: Sequence[TimedRequest]) -> list[RequestRatio]:
    """Return output tokens/s and mean TTFT, TPOT and E2E of B over A, as far as both runs have them."""
    return ratios_of_times(request_times(a), request_times(b))


def ratios_of_times(a: dict[str, MedianInterval], b: dict[str, MedianInterval]) -> list[RequestRatio]:
    """Return the ratios of the figures that both have, from their times with intervals."""
    ratios = []
    for figure in (figure for figure in a if figure in b):
        time_a, time_b, higher_is_better = a[figure], b[figure], FIGURES[figure][1]
        ratio = ratio_of(time_a, time_b) if higher_is_better else ratio_of(time_b, time_a)
        values = [1 / time.median if higher_is_better else time.median for time in (time_a, time_b)]
        ratios.append(
            RequestRatio(
                figure=figure, a=values[0], b=values[1], ratio=ratio.ratio, low=ratio.low, high=ratio.high,
                higher_is_better=higher_is_better,
                blocks=((time_a.blocks, time_a.block), (time_b.blocks, time_b.block)),
            )
        )  # fmt: skip
    return ratios


def request_times(requests: Sequence[TimedRequest]) -> dict[str, MedianInterval]:
    """Return the time per output token of the whole load (s) and mean latencies (ms) of one run with intervals.

    The estimate is a mean, in the place of the median.
    """
    ordered = TimedRequests(sorted(requests, key=attrgetter("arrival")))
    whole = metrics.throughput(ordered)
    if whole is None:
        return {}
    times = {}
    for figure, (sums, higher_is_better) in FIGURES.items():
        tops, bottoms = sums(ordered)
        if higher_is_better:  # output tokens/s: its inverse is a time
            tops, bottoms = bottoms, tops
        if sum(tops) > 0 and sum(bottoms) > 0:
            times[figure] = _mean_interval(tops, bottoms, 1 / whole.mean_concurrency if higher_is_better else 1.0)
    return times


def _mean_interval(tops: Sequence[float], bottoms: Sequence[float], scale: float) -> MedianInterval:
    """Return sum of tops over sum of bottoms, times the scale."""
    n, mean = len(tops), sum(tops) / sum(bottoms)
    block = min(n, max(_block_length(tops, bottoms), ceil(n / MOST_BLOCKS)))
    blocks = _block_sums(tops, bottoms, block)
    if len(blocks) > 1 and n % block:
        blocks.pop()  # a shorter end would weigh as much as the others
    low: float | None = None
    high: float | None = None
    if n >= FEWEST_REQUESTS and len(blocks) >= FEWEST_BLOCKS:
        chance = random.Random(SEED)
        resampled = [_quotient(chance.choices(blocks, k=len(blocks))) for _ in range(RESAMPLES)]
        ratios = [value / mean for value in resampled if value]
        below, above = metrics.percentile(ratios, 2.5), metrics.percentile(ratios, 97.5)
        if below is not None and above is not None and len(ratios) == RESAMPLES:
            wider = few_blocks_factor(len(blocks))
            low, high = scale * mean * min(1.0, below) ** wider, scale * mean * max(1.0, above) ** wider
    return MedianInterval(median=scale * mean, low=low, high=high, n=n, block=block, blocks=len(blocks))


def _block_length(tops: Sequence[float], bottoms: Sequence[float]) -> int:
    """Return how many neighbours form a block, from the autocorrelation of whether a request is above the median."""
    cell = ceil(len(tops) / CELLS)
    means = [_quotient([sums]) or 0.0 for sums in _block_sums(tops, bottoms, cell)]
    middle = median(means)
    return cell * block_length([mean > middle for mean in means])


def _block_sums(tops: Sequence[float], bottoms: Sequence[float], size: int) -> list[Sums]:
    """Return the sums of each block of neighbours; the last block may be smaller."""
    starts = range(0, len(tops), size)
    return [(sum(tops[start : start + size]), sum(bottoms[start : start + size])) for start in starts]


def _quotient(blocks: Sequence[Sums]) -> float | None:
    top, bottom = sum(block[0] for block in blocks), sum(block[1] for block in blocks)
    return top / bottom if bottom > 0 else None
