"""Ladders of a sweep: the values of a load or of a setting, written as lists and ranges.

parse_ladder("1,2,4..1024", whole=True) -> (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
parse_ladder("1..50")                   -> (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 50.0)       doubling, and the end
parse_ladder("10..50+10")               -> (10.0, 20.0, 30.0, 40.0, 50.0)               by steps
parse_precision("5%")                   -> Precision(relative=0.05)
"""

import re
from dataclasses import dataclass
from math import isfinite

from llmb.errors import ConfigError

MOST_POINTS = 1000
NUMBER = r"\d+(?:\.\d+)?(?:e\d+)?"
ELEMENT = re.compile(rf"({NUMBER})(?:\.\.({NUMBER})(?:\+({NUMBER}))?)?")
EXAMPLES = "write values and ranges: 1,2,8 or 1..1024 (doubling) or 10..50+10 (steps)"


def parse_ladder(text: str, whole: bool = False, option: str = "ladder") -> tuple[float, ...]:
    """Return the values in rising order, each once; `whole`: integers only."""
    values: set[float] = set()
    for element in text.split(","):
        match = ELEMENT.fullmatch(element.strip())
        if match is None:
            raise ConfigError(f"{option} {text!r}: {element.strip()!r} is no positive number or range; {EXAMPLES}")
        values.update(_range(match, f"{option} {text!r}"))
        if len(values) > MOST_POINTS:
            raise ConfigError(f"{option} {text!r}: more than {MOST_POINTS} values")
    if whole:
        if fractional := [value for value in sorted(values) if value != int(value)]:
            raise ConfigError(f"{option} {text!r}: {fractional[0]:g} is not a whole number")
        return tuple(sorted(int(value) for value in values))
    return tuple(sorted(values))


def _range(match: re.Match[str], subject: str) -> list[float]:
    first, last, step = (None if number is None else float(number) for number in match.groups())
    if not all(number is None or (isfinite(number) and number > 0) for number in (first, last, step)):
        raise ConfigError(f"{subject}: numbers must be above 0; {EXAMPLES}")
    assert first is not None
    if last is None:
        return [first]
    if last < first:
        raise ConfigError(f"{subject}: the range {match[0]} ends below its start")
    values = [first]
    while values[-1] < last and len(values) <= MOST_POINTS:
        following = values[-1] * 2 if step is None else first + step * len(values)
        values.append(min(following, last))
    return values


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Width of the bracket at which a search ends: absolute, or a fraction of the load that holds."""

    absolute: float = 0.0
    relative: float = 0.0

    def reached(self, passing: float, failing: float) -> bool:
        """Return whether a bracket is narrow enough."""
        return failing - passing <= max(self.absolute, self.relative * passing)


def parse_precision(text: str) -> Precision:
    """Return the precision of a search: 2 (of the load's unit) or 5%."""
    match = re.fullmatch(rf"({NUMBER})\s*(%?)", text.strip())
    if match is None or not isfinite(float(match[1])):
        raise ConfigError(f"--precision {text!r}: expected a number such as 2, or a percentage such as 5%")
    return Precision(relative=float(match[1]) / 100) if match[2] else Precision(absolute=float(match[1]))
