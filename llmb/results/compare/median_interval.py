"""Median of a time series with a 95 % interval that accounts for the correlation between neighbours.

    median_interval(step_times) -> MedianInterval(median=0.512, low=0.509, high=0.515, n=400, block=6, blocks=66)

Steps in sequence share clocks, temperature and other load. So contiguous blocks are resampled instead of single steps
(moving blocks would need more memory for the same answer), each as long as the autocorrelation requires by Politis and
White's rule (2004, corrected 2009) on whether a step is above the median, the part of a series that its median depends
on. The percentiles of the resampled medians are widened by Student's quantile for few blocks (Hesterberg, 2015); below
three blocks the interval is the range of all samples.
`ratio_of` combines two intervals (Zou and Donner's MOVER, 2008), so a stored interval is enough to compare with a run.

The blocks are sorted once; a resampled median is a bisection over ranks that counts in each block. At most 100 blocks
are used, so 100,000 samples take O(n log n) time and the memory of two copies.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from llmb.errors import ConfigError
from llmb.perfmodel.metrics import percentile
from llmb.results.compare.student import student_quantile

CONFIDENCE = 0.95
FEWEST_SAMPLES = 5  # for an interval
FEWEST_BLOCKS = 3
FEWEST_NEIGHBOURS = 10  # samples, below which their correlation cannot be told
MOST_BLOCKS = 100
MOST_LAGS = 50  # of the autocorrelation; longer memory matters only to series whose blocks are longer anyway
RESAMPLES = 500
SEED = 1234  # the same samples always give the same interval


@dataclass(frozen=True, kw_only=True)
class MedianInterval:
    """Median of samples. The interval is None for too few samples; the range of all where their blocks are too few."""

    median: float
    low: float | None
    high: float | None
    n: int
    block: int  # length of the blocks that are resampled; 1: neighbours are not correlated
    blocks: int


@dataclass(frozen=True, kw_only=True)
class RatioInterval:
    """Ratio of two positive figures with its 95 % interval, if both have one."""

    ratio: float
    low: float | None
    high: float | None


def median_interval(samples: Sequence[float]) -> MedianInterval:
    """Return the median of positive samples in the order they were measured."""
    if not samples or min(samples) <= 0:
        raise ConfigError("nothing to compare: a run has no measured steps")
    if not math.isfinite(sum(samples)):
        raise ConfigError("nothing to compare: the time of a step is not finite")
    n, middle = len(samples), median(samples)
    block = max(block_length([x > middle for x in samples]), math.ceil(n / MOST_BLOCKS))
    blocks = [sorted(samples[start : start + block]) for start in range(0, n - block + 1, block)]  # a shorter end left
    if n < FEWEST_SAMPLES:
        return MedianInterval(median=middle, low=None, high=None, n=n, block=block, blocks=len(blocks))
    if len(blocks) < FEWEST_BLOCKS:  # a drift or a period as long as the series
        return MedianInterval(median=middle, low=min(samples), high=max(samples), n=n, block=block, blocks=len(blocks))
    resampled = _resampled_medians(blocks)
    below, above = percentile(resampled, 2.5), percentile(resampled, 97.5)
    assert below is not None
    assert above is not None
    wider = few_blocks_factor(len(blocks))
    return MedianInterval(
        median=middle,
        low=middle * min(1.0, below / middle) ** wider,
        high=middle * max(1.0, above / middle) ** wider,
        n=n,
        block=block,
        blocks=len(blocks),
    )


def ratio_of(numerator: MedianInterval, denominator: MedianInterval) -> RatioInterval:
    """Return the ratio of two medians of independent samples."""
    ratio = numerator.median / denominator.median
    if numerator.low is None or numerator.high is None or denominator.low is None or denominator.high is None:
        return RatioInterval(ratio=ratio, low=None, high=None)
    down, up = math.log(numerator.median / numerator.low), math.log(numerator.high / numerator.median)
    down_2, up_2 = math.log(denominator.median / denominator.low), math.log(denominator.high / denominator.median)
    return RatioInterval(ratio=ratio, low=ratio * math.exp(-math.hypot(down, up_2)),
                         high=ratio * math.exp(math.hypot(up, down_2)))  # fmt: skip


def block_length(flags: Sequence[bool]) -> int:
    """Return how many neighbours form a block, from the autocorrelation of the flags; 1: they are independent."""
    n, ones = len(flags), sum(flags)
    mean = ones / n
    if n < FEWEST_NEIGHBOURS or not 0 < mean < 1:
        return 1
    series = [flag - mean for flag in flags]
    covariances = [sum(x * x for x in series) / n]
    significant = 2 * math.sqrt(math.log10(n) / n)
    quiet_lags = max(5, math.ceil(math.sqrt(math.log10(n))))
    last = 0  # lag with a significant correlation
    for lag in range(1, min(MOST_LAGS, n - 1, math.ceil(math.sqrt(n)) + quiet_lags) + 1):
        covariances.append(sum(x * y for x, y in zip(series, series[lag:], strict=False)) / n)
        if abs(covariances[lag]) > significant * covariances[0]:
            last = lag
        elif lag - last >= quiet_lags:
            break
    # A short series hides a correlation that is not significant: at least the block of an AR(1) process of its own.
    neighbours = covariances[1] / covariances[0]
    least = (2 * max(0.0, neighbours) / (1 - neighbours**2)) ** (2 / 3) if neighbours < 1 else n
    lags = range(min(2 * last, len(covariances) - 1) + 1)
    weights = [min(1.0, 2 * (1 - lag / (2 * last))) if last else 1.0 for lag in lags]
    spectrum = covariances[0] + 2 * sum(w * c for w, c in zip(weights[1:], covariances[1:], strict=False))
    moment = 2 * sum(lag * w * c for lag, (w, c) in enumerate(zip(weights, covariances, strict=False)))
    length = abs(moment / spectrum) ** (2 / 3) if spectrum > 0 and moment > 0 else 0.0  # else neighbours alternate
    return min(n, max(1, round((1.5 * n) ** (1 / 3) * max(length, least))))


def _resampled_medians(blocks: Sequence[list[float]]) -> list[float]:
    ranked = sorted(x for block in blocks for x in block)
    chance, half = random.Random(SEED), len(ranked) / 2
    medians = []
    for _ in range(RESAMPLES):
        chosen = chance.choices(blocks, k=len(blocks))
        first, last = 0, len(ranked) - 1
        while first < last:  # the smallest sample that at least half of the resampled ones do not exceed
            middle = (first + last) // 2
            if sum(bisect_right(block, ranked[middle]) for block in chosen) >= half:
                last = middle
            else:
                first = middle + 1
        medians.append(ranked[first])
    return medians


def few_blocks_factor(blocks: int) -> float:
    """Return by how much the percentiles over few resampled blocks are too narrow."""
    quantile = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return student_quantile(CONFIDENCE, blocks - 1) / quantile * math.sqrt(blocks / (blocks - 1))
