"""Search for the highest load that holds a limit: bracketing by doubling, then bisection.

    next_load({1: True, 2: True, 4: False}, SearchRange(lowest=1, highest=1024)) -> 3
    next_load({1: True, 2: True, 3: True, 4: False}, ...)                        -> None: 3 is the answer

The next load follows from the loads judged so far and from nothing else. So a search that was killed continues where it
stopped, points that another search of the same sweep measured count here as well, and no load is measured twice. A
limit is assumed to hold up to some load and at none above. Where noise contradicts that, the lowest load that fails
bounds the answer. For an answer x within lowest = 1 to highest, a search alone measures at most 2 x log2(x) + 2 loads.

Loads are multiples of `unit`, computed as integers: rates of 0.1 and 0.2 requests/s have no rounding errors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmb.errors import ConfigError
from llmb.loadgen.sweep.ladder import Precision

EXACT = Precision()


@dataclass(frozen=True, kw_only=True)
class SearchRange:
    """Loads that a search may measure: multiples of `unit` from lowest to highest, which are rounded to them."""

    lowest: float
    highest: float
    unit: float = 1.0
    precision: Precision = EXACT

    def __post_init__(self) -> None:
        if not 0 < self.unit <= self.lowest <= self.highest:
            raise ConfigError(f"search range {self.lowest:g}..{self.highest:g}: expected {self.unit:g} <= low <= high")

    def ticks(self, load: float) -> int:
        return round(load / self.unit)

    def load(self, ticks: int) -> float:
        """Return the load of a number of units: an integer for whole units, else without binary noise."""
        return ticks * int(self.unit) if self.unit == int(self.unit) else round(ticks * self.unit, 9)


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """Highest load that holds and lowest that does not; None: not measured."""

    passing: float | None
    failing: float | None
    contradicted: tuple[float, ...] = ()  # loads that hold above the lowest that does not


def bracket(judged: Mapping[float, bool]) -> Bracket:
    """Return the bracket around the answer."""
    failing = min((load for load, holds in judged.items() if not holds), default=None)
    passing = [load for load, holds in judged.items() if holds]
    above = () if failing is None else tuple(sorted(load for load in passing if load > failing))
    return Bracket(
        passing=max((load for load in passing if failing is None or load < failing), default=None),
        failing=failing,
        contradicted=above,
    )


def next_load(judged: Mapping[float, bool], search: SearchRange) -> float | None:
    """Return the load to measure next, or None when the answer is known: `bracket(judged).passing`."""
    lowest, highest = search.ticks(search.lowest), search.ticks(search.highest)
    around = bracket({load: holds for load, holds in judged.items() if lowest <= search.ticks(load) <= highest})
    if around.failing is None:
        if around.passing is None:
            return search.load(lowest)
        passing = search.ticks(around.passing)
        return None if passing >= highest else search.load(min(2 * passing, highest))
    failing = search.ticks(around.failing)
    passing = lowest - 1 if around.passing is None else search.ticks(around.passing)
    if failing - passing <= 1:
        return None
    if around.passing is not None and search.precision.reached(around.passing, around.failing):
        return None
    return search.load((passing + failing) // 2)


def next_of_many(judgements: Iterable[Mapping[float, bool]], search: SearchRange) -> float | None:
    """Return the next load of the first search that is not finished; they share all measured loads."""
    return next((load for judged in judgements if (load := next_load(judged, search)) is not None), None)
