"""Numbers of a timeline in readable form: durations, bytes, fractions, and the ticks of an axis.

duration(0.0136) -> "13.6 ms"        marks(1.61) -> Marks(every=0.2, unit="s", scale=1.0, decimals=1)
"""

import math
from dataclasses import dataclass

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "\u00b5s"))


def duration(seconds: float) -> str:
    """Format with three significant digits and a unit."""
    if seconds == 0:
        return "0 s"
    for scale, unit in _UNITS:
        if round(abs(seconds) / scale, 3) >= 1 or scale == 1e-6:
            return f"{figures(seconds / scale)} {unit}"
    raise AssertionError("the last unit takes whatever is left")


def figures(value: float) -> str:
    """Format with three significant digits, without an exponent: 1234, 123, 12.3, 1.23, 0.123."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")  # before its figures are counted: 99.99 is 100, not 100.0
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{min(decimals, 4)}f}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(fraction: float) -> str:
    """Format a fraction: whole percents where these suffice, tenths below ten and close to a hundred."""
    value = 100 * fraction
    if 0 < value < 0.1:
        return "less than 0.1 %"
    return f"{value:.0f} %" if 10 <= value < 99 or round(value, 1) in (0.0, 100.0) else f"{value:.1f} %"


def difference(ratio: float) -> str:
    """Format a ratio as its difference from one: +1.9 %."""
    off = round(100 * (ratio - 1), 1)
    return f"{off:+.1f} %" if off else "0.0 %"


def size(count: float) -> str:
    """Format bytes in units of 1000, as link speeds are given."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{figures(count / scale)} {unit}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class Marks:
    """Ticks of an axis from 0, in the unit of their labels."""

    every: float  # in the axis' own unit
    unit: str
    scale: float
    decimals: int

    def up_to(self, end: float) -> list[float]:
        return [i * self.every for i in range(math.floor(end / self.every * (1 + 1e-9)) + 1)]

    def label(self, value: float) -> str:
        return f"{value / self.scale:,.{self.decimals}f}"


def marks(seconds: float, at_most: int = 12) -> Marks:
    """Return ticks of 1, 2 or 5 times a power of ten, as many as fit."""
    every = _round_step(seconds / at_most)
    scale, unit = next(((s, u) for s, u in _UNITS if seconds >= 2 * s), _UNITS[-1])
    return Marks(every, unit, scale, max(0, -math.floor(math.log10(every / scale) + 1e-9)))


def ceiling(value: float) -> float:
    """Return the next larger of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten: the top of a strip."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
