"""Percentiles of many samples, interpolated linearly as in numpy: by sorting few of them, by selection among many.

percentiles([3.0, 1.0, 2.0], (50, 95)) -> {50: 2.0, 95: 2.9}
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, repeat
from math import sqrt
from random import Random

MOST_SORTED = 200_000  # samples; of more, percentiles are selected
SAMPLE = 50_000  # of them, that tells where a percentile lies


def interpolate(ranked: Sequence[float], q: float) -> float:
    """Return the q-th percentile of sorted values."""
    rank = (len(ranked) - 1) * q / 100
    low = min(int(rank), len(ranked) - 1)
    high = min(low + 1, len(ranked) - 1)
    fraction = rank - low
    value = ranked[low] * (1 - fraction) + ranked[high] * fraction
    return min(max(value, ranked[low]), ranked[high])  # rounding must not leave the interval


def percentiles(values: Sequence[float], percents: Sequence[int]) -> dict[int, float]:
    """Return several percentiles; of many values by selection, which needs no sorted copy of them."""
    if len(values) <= MOST_SORTED:
        ranked = sorted(values)
        return {q: interpolate(ranked, q) for q in percents}
    positions = {q: (len(values) - 1) * q / 100 for q in percents}
    lows = {int(position) for position in positions.values()}
    ranked_values = _selected(values, lows | {min(low + 1, len(values) - 1) for low in lows})
    return {
        q: interpolate(
            [ranked_values[int(position)], ranked_values[min(int(position) + 1, len(values) - 1)]], 100 * (position % 1)
        )
        for q, position in positions.items()
    }


def order_statistics(values: Sequence[float], ranks: Iterable[int]) -> dict[int, float]:
    """Return the values of some ranks, from 0."""
    if len(values) > MOST_SORTED:
        return _selected(values, ranks)
    ranked = sorted(values)
    return {rank: ranked[rank] for rank in ranks}


def _selected(values: Sequence[float], ranks: Iterable[int]) -> dict[int, float]:
    """Return the values of some ranks without sorting all: a sample tells between which values each rank lies,
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
