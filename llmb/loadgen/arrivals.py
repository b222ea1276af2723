"""Arrival processes: when each request is due, in seconds since the start of the load. Pure and seeded.

    islice(arrival_times(Arrivals("poisson", rate=8.0), seed=1234), 100)
    slot_starts(concurrency=32, ramp_s=10.0)         # closed loop: when each of 32 users sends its first request

Intervals are those of a unit-rate process: 1 (constant), exponential (Poisson) or gamma distributed. A ramp maps its
times by the inverse of the expected number of arrivals, so that a Poisson process stays one. Nothing is rescaled to hit
a total: the number of arrivals in a given time varies with the seed, as it does for a real service.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from math import sqrt
from random import Random
from typing import Literal


@dataclass(frozen=True)
class Arrivals:
    """Open-loop arrivals at a rate, which may rise linearly from a fraction of itself over `ramp_s`."""

    kind: Literal["constant", "poisson", "gamma"]
    rate: float  # requests/s
    burstiness: float = 1.0  # shape of gamma intervals: their squared coefficient of variation is 1 / burstiness
    ramp_s: float = 0.0
    ramp_start: float = 0.0


def arrival_times(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Yield the times of all arrivals, without end."""
    random = Random(f"arrivals {seed}")
    if arrivals.kind == "constant":
        unit_times: Iterator[float] = map(float, count())
    elif arrivals.kind == "poisson":
        unit_times = accumulate(random.expovariate(1.0) for _ in repeat(None))
    else:
        shape = arrivals.burstiness
        unit_times = accumulate(random.gammavariate(shape, 1.0 / shape) for _ in repeat(None))
    # The inverse of a ramp rounds: of two arrivals 1e-17 apart the second may come out earlier by its last bit.
    return accumulate((_time_of(unit, arrivals) for unit in unit_times), max)


def _time_of(expected: float, arrivals: Arrivals) -> float:
    """Return when this many arrivals are expected: the inverse of rate * (start * t + (1 - start) * t^2 / (2 ramp))."""
    rate, ramp, start = arrivals.rate, arrivals.ramp_s, arrivals.ramp_start
    if ramp <= 0:
        return expected / rate
    in_ramp = rate * ramp * (1 + start) / 2
    if expected >= in_ramp:
        return ramp + (expected - in_ramp) / rate
    growth = rate * (1 - start) / ramp
    if growth <= 0:
        return expected / rate
    root = sqrt((rate * start) ** 2 + 2 * growth * expected)
    return 2 * expected / (rate * start + root) if root > 0 else 0.0  # without cancellation for small counts


def slot_starts(concurrency: int, ramp_s: float = 0.0, ramp_start: float = 0.0) -> list[float]:
    """Return when each of the concurrent users begins; all at once without a ramp."""
    if ramp_s <= 0 or ramp_start >= 1:
        return [0.0] * concurrency
    return [ramp_s * max(0.0, k / concurrency - ramp_start) / (1 - ramp_start) for k in range(concurrency)]


def share(total: int, index: int, size: int) -> int:
    """Return how many of `total` things the process `index` of `size` has."""
    return total // size + (index < total % size)
