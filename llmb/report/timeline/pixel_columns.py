"""Interval of time as columns of pixels: the position of a moment, and what falls into each column.

    spread([(0.0, 1.5, 3.0)], Columns(left=0, count=2, start=0.0, end=2.0)) -> [2.0, 1.0]

A run has more events than a picture has pixels. What is narrower than a column is not drawn by itself, but adds its
fraction to the column it falls into, so that nothing is lost and a picture stays small.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """`count` columns, one unit wide each, from x = left; they cover the time from start to end."""

    left: int
    count: int
    start: float
    end: float

    @property
    def seconds_each(self) -> float:
        return (self.end - self.start) / self.count

    def x(self, time: float) -> float:
        """Return the position of a moment, clamped to the interval."""
        inside = min(max(time, self.start), self.end)
        return self.left + (inside - self.start) / (self.end - self.start) * self.count

    def width(self, start: float, end: float) -> float:
        return self.x(end) - self.x(start)


def spread(amounts: Iterable[tuple[float, float, float]], columns: Columns) -> list[float]:
    """Sum amounts (start, end, amount), each even over its time, by column."""
    sums = [0.0] * columns.count
    for start, end, amount in amounts:
        if end <= start or end <= columns.start or start >= columns.end:
            continue
        a, b = columns.x(start) - columns.left, columns.x(end) - columns.left
        density = amount / ((end - start) / columns.seconds_each)  # for each column wholly covered
        for i in range(int(a), min(math.ceil(b), columns.count)):
            sums[i] += density * (min(b, i + 1) - max(a, i))
    return sums


def levels(samples: Sequence[tuple[float, float]], columns: Columns) -> list[float | None]:
    """Return the maximum in each column of a step function given by samples sorted by time."""
    values: list[float | None] = [None] * columns.count
    times = [time for time, _ in samples]
    first = max(0, bisect_right(times, columns.start) - 1)  # whose value holds when the columns begin
    for i in range(first, bisect_right(times, columns.end)):
        time, value = samples[i]
        until = times[i + 1] if i + 1 < len(times) else columns.end
        a, b = columns.x(time) - columns.left, columns.x(until) - columns.left
        for column in range(min(int(a), columns.count - 1), min(math.ceil(b), columns.count)):
            current = values[column]
            values[column] = value if current is None else max(current, value)
    return values


def stacked(
    shares: Sequence[Sequence[float]], height: float, unit: float = 0.5
) -> list[list[tuple[int, float, float]]]:
    """Return bars of each layer, the first at the bottom: for each column (column, from, to), rounded to `unit`.

    Fractions of a column that exceed 1 in total, as clocks are not exact, are scaled to fill it.
    """
    bars: list[list[tuple[int, float, float]]] = [[] for _ in shares]
    for column, values in enumerate(zip(*shares, strict=True)):
        full = max(1.0, sum(values))
        low = 0.0
        reached = 0.0
        for layer, value in zip(bars, values, strict=True):
            reached += value / full * height
            high = round(reached / unit) * unit
            if high > low:
                layer.append((column, low, high))
            low = high
    return bars


def runs(values: Sequence[float | None], unit: float = 0.5) -> list[tuple[int, int, float]]:
    """Merge neighbouring columns of the same value: (first, count, value), values rounded to `unit`."""
    bars: list[tuple[int, int, float]] = []
    for column, value in enumerate(values):
        if value is None:
            continue
        rounded = round(value / unit) * unit
        if bars and bars[-1][0] + bars[-1][1] == column and bars[-1][2] == rounded:
            bars[-1] = (bars[-1][0], bars[-1][1] + 1, rounded)
        else:
            bars.append((column, 1, rounded))
    return bars
