"""Thinning of long series for a chart: the smallest, median and largest value of each bin, so that no peak is lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MOST_POINTS = 2000  # of a series that is drawn as it is
BINS = 800  # of a longer one: about one for each pixel


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """Bins of a series; in a series that was not thinned every bin holds one value."""

    x: tuple[float, ...]  # middle of the bin
    low: tuple[float, ...]
    middle: tuple[float, ...]  # median
    high: tuple[float, ...]
    per_bin: int  # values

    def caption(self, noun: str) -> str | None:
        """Return the sentence that says so; None where nothing was thinned."""
        if self.per_bin == 1:
            return None
        return (
            f"Thinned: each point stands for {self.per_bin:,} {noun}; the line is their median, the band reaches from "
            "the smallest to the largest."
        )


def thin(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS, bins: int = BINS) -> Thinned:
    """Thin a series if it has more than `most` values."""
    if len(x) <= most:
        values = tuple(y)
        return Thinned(x=tuple(x), low=values, middle=values, high=values, per_bin=1)
    per_bin = -(-len(x) // bins)
    starts = range(0, len(x), per_bin)
    groups = [y[start : start + per_bin] for start in starts]
    return Thinned(
        x=tuple(x[min(start + per_bin // 2, len(x) - 1)] for start in starts),
        low=tuple(min(group) for group in groups),
        middle=tuple(median(group) for group in groups),
        high=tuple(max(group) for group in groups),
        per_bin=per_bin,
    )
