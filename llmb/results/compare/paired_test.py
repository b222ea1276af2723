"""Sequential test of two configurations that run in turns, after A against itself has shown the noise.

    result = paired_test(measure, pairs=10)     measure("A") runs A once and returns its time per token

Runs come in pairs in the order AB BA AB BA, so a linear drift of the machine cancels over two pairs. The difference of
a pair is the logarithm of its ratio of speeds; its mean has Student's interval.

Error rate: the test looks at its data after 4, 6, 8, ... pairs, at most at a number of times fixed beforehand, and look
k uses the level alpha_k, proportional to its pairs, with sum(alpha_k) = 5 %. By the union bound, equal configurations
are called different at any look in at most 5 % of tests, however the looks depend on one another, and the intervals of
all looks hold the truth together in 95 %. Ending early for "no difference" only lowers that rate.

Noise floor: half the width that the last look would have at the noise of A against itself. No more pairs are run once
an interval is as narrow.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from llmb.errors import ConfigError
from llmb.results.compare.student import student_quantile

ALPHA = 0.05
FIRST_LOOK = 4  # pairs; of fewer Student's interval is too wide to exclude anything
AA_PAIRS = 4  # of A against itself
MOST_PAIRS = 200

Measure = Callable[[str], float]  # "A" or "B" -> seconds per token, or any other time


@dataclass(frozen=True, kw_only=True)
class Look:
    """Speed of B over that of A after some pairs, with an interval at the level of this look."""

    pairs: int
    confidence: float
    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        return self.low > 1 or self.high < 1

    @property
    def largest_difference(self) -> float:
        """Largest relative difference of speeds that the interval allows: 0.01 is 1 %."""
        return max(self.high - 1, 1 - self.low)

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the logarithm."""
        return math.log(self.high / self.low) / 2


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Outcome: `different`, `same` (the interval is as narrow as the noise allows) or `undecided` after all pairs."""

    outcome: Literal["different", "same", "undecided"]
    floor: float  # relative difference that this many pairs can show at the noise of A against itself
    itself: Look  # A against itself, 95 %
    looks: tuple[Look, ...]
    times_a: tuple[float, ...]
    times_b: tuple[float, ...]

    @property
    def last(self) -> Look:
        return self.looks[-1]


def look_pairs(pairs: int) -> list[int]:
    """Return after how many pairs the test looks at its data."""
    if not FIRST_LOOK <= pairs <= MOST_PAIRS:
        raise ConfigError(f"--repeats: expected {FIRST_LOOK} to {MOST_PAIRS} pairs of runs, got {pairs}")
    return sorted({*range(FIRST_LOOK, pairs + 1, 2), pairs})


def look_levels(pairs: int) -> dict[int, float]:
    """Return the level of each look by its pairs; they sum to ALPHA."""
    looks = look_pairs(pairs)
    return {k: ALPHA * k / sum(looks) for k in looks}


def paired_test(measure: Measure, pairs: int, on_look: Callable[[Look], None] = lambda look: None) -> PairedTest:
    """Run A against itself, then A and B in turns until the intervals decide or all pairs are done."""
    levels = look_levels(pairs)
    aa_times = list(_pairs(lambda _: measure("A"), AA_PAIRS))
    aa_differences = _differences(aa_times)
    itself = _look(aa_differences, ALPHA)
    last_quantile = student_quantile(1 - levels[pairs], pairs - 1)
    floor = last_quantile * stdev(aa_differences) / math.sqrt(pairs)
    times: list[tuple[float, float]] = []
    looks: list[Look] = []
    outcome: Literal["different", "same", "undecided"] = "undecided"
    for pair in _pairs(measure, pairs):
        times.append(pair)
        if len(times) not in levels:
            continue
        look = _look(_differences(times), levels[len(times)])
        looks.append(look)
        on_look(look)
        if look.differs or look.half_width <= floor:
            outcome = "different" if look.differs else "same"
            break
    return PairedTest(
        outcome=outcome, floor=math.expm1(floor), itself=itself, looks=tuple(looks),
        times_a=tuple(a for a, _ in times), times_b=tuple(b for _, b in times),
    )  # fmt: skip


def _pairs(measure: Measure, count: int) -> Iterator[tuple[float, float]]:
    """Yield the times of A and B, in the order AB BA AB ..."""
    for pair in range(count):
        if pair % 2 == 0:
            a, b = measure("A"), measure("B")
        else:
            b, a = measure("B"), measure("A")
        yield a, b


def _differences(times: Sequence[tuple[float, float]]) -> list[float]:
    return [math.log(a / b) for a, b in times]


def _look(differences: Sequence[float], level: float) -> Look:
    n, mean = len(differences), fmean(differences)
    half = student_quantile(1 - level, n - 1) * stdev(differences) / math.sqrt(n)
    return Look(
        pairs=n,
        confidence=1 - level,
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
    )
