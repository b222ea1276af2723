"""Plan of a sweep: which loads on which variants, how long each point runs, and an estimate of it all. No I/O.

    plan.next_load(measured loads, judgements of each tier) -> the load to measure next

A plan is stored as sweep.json before anything is measured, so that a killed sweep continues from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log2, log10
from typing import Any, Literal

from llmb.loadgen.sweep.ladder import Precision
from llmb.loadgen.sweep.load_search import EXACT, SearchRange, next_of_many

RATE_DIGITS = 2  # decimals of the lowest rate, at least: rates of a search are multiples of 0.01 from 1 request/s
TIMEOUT_TIMES = 10  # E2E of the lowest load, after which a request of an overloaded server is given up
LEAST_TIMEOUT_S = 60.0
LIMIT_TIMES = 10  # point_s, after which a point sends no more
FEW_USERS = 8  # who send many requests one after the other, however slow the server is
FEWEST_REQUESTS = 4  # of a point
FEWEST_AT_RANDOM = 16  # of a rate, where that takes no longer than the limit: fewer random times are no rate
E2E_GROWTH = 0.4  # assumed, not measured: between flat (small batches) and in proportion (large ones)
MARGIN = 1.25  # of the requests that the last point suggests: throughput rises with the load


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Loads and variants that a sweep measures."""

    schema: int = 1
    name: str
    mode: Literal["url", "serve", "in_process"]
    load_kind: Literal["concurrency", "rate"]
    ladder: tuple[float, ...]  # in rising order; of a search its range
    tiers: dict[str, str] = field(default_factory=dict)  # name: limits, as --slo takes them
    search: bool = False  # look for the highest load of each tier instead of measuring the whole ladder
    precision: Precision = EXACT
    variants: tuple[str, ...] = ("",)  # settings that vary, one engine each: max_num_tokens=2048
    repeats: int = 1
    point_s: float = 10.0  # for which a point sends requests at least, where the server is fast enough
    waves: float = 2.0  # requests per unit of concurrency at least: fewer never fill the server
    ramp: float = 0.0  # of the expected E2E, over which a concurrency is reached: requests do not march in step
    isl: int | None = None  # tokens of a request; null: they come from a file
    osl: int | None = None
    gpus: int | None = None
    target: str | None = None  # what is measured, in words
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)  # by variant: what a point is derived from
    command: tuple[str, ...] = ()  # as typed, without secrets

    @property
    def range(self) -> SearchRange:
        unit = (
            1.0 if self.load_kind == "concurrency" else 10.0 ** min(0, floor(log10(self.ladder[0]))) / 10**RATE_DIGITS
        )
        return SearchRange(lowest=self.ladder[0], highest=self.ladder[-1], unit=unit, precision=self.precision)

    def next_load(self, measured: Sequence[float], judged: Sequence[Mapping[float, bool]]) -> float | None:
        """Return the next load on a variant, or None when it is finished; `judged`: of each tier."""
        if self.search:
            return next_of_many(judged, self.range)
        return next((load for load in self.ladder if load not in measured), None)

    @property
    def most_points(self) -> int:
        """Measurements at most, repeats included; the bound of a search assumes that tiers share its bracketing."""
        loads = len(self.ladder)
        if self.search:
            doublings = ceil(log2(self.ladder[-1] / self.ladder[0])) + 1
            widest = max(1.0, (self.ladder[-1] / 2) / self._resolution)
            loads = doublings + max(1, len(self.tiers)) * ceil(log2(widest) if widest > 1 else 0)
        return loads * len(self.variants) * self.repeats

    @property
    def _resolution(self) -> float:
        """Width at which a bracket at the upper end is narrow enough."""
        return max(self.range.unit, self.precision.absolute, self.precision.relative * self.ladder[-1] / 2)

    def fewest_requests(self, load: float) -> int:
        """Return how many requests a point has at least: enough to fill the server, or to last point_s."""
        if self.load_kind == "rate":
            several = min(FEWEST_AT_RANDOM, ceil(load * LIMIT_TIMES * self.point_s))
            return max(FEWEST_REQUESTS, several, ceil(load * self.point_s))
        return max(FEWEST_REQUESTS, ceil(self.waves * load))

    def point_load(self, load: float, earlier: Mapping[float, tuple[float | None, float | None]]) -> "PointLoad":
        """Return the load of a point, from the rate (requests/s) and E2E (ms) of the loads measured before it.

        A concurrency is held for point_s, or for `waves` requests per user where that takes longer.
        """
        limit_s = LIMIT_TIMES * self.point_s
        figures = {key: (rate, e2e_ms) for key, (rate, e2e_ms) in earlier.items() if rate and e2e_ms}
        requests = self.fewest_requests(load)
        if self.load_kind == "rate":
            times = [TIMEOUT_TIMES * (e2e_ms or 0.0) / 1000 for _, e2e_ms in figures.values()]
            timeout_s = max(LEAST_TIMEOUT_S, min(times) + 2 * self.point_s) if times else None
            return PointLoad(requests=requests, limit_s=limit_s, timeout_s=timeout_s)
        if not figures:
            return PointLoad(requests=requests, limit_s=limit_s, for_s=self.point_s if load <= FEW_USERS else None)
        nearest = min(figures, key=lambda key: (abs(log2(key / load)), key))
        rate, e2e_ms = figures[nearest]
        expected = (rate or 0.0) * min(1.0, load / nearest) * (MARGIN if load > nearest else 1.0)
        return PointLoad(
            requests=max(requests, ceil(expected * self.point_s)),
            ramp_s=round(self.ramp * (e2e_ms or 0.0) / 1000, 3) if load > 1 else 0.0,
            limit_s=limit_s,
        )

    def seconds_left(self, measured: Mapping[float, float | None]) -> float | None:
        """Return the expected time of a ladder's remaining loads, from the E2E (ms) of those measured; None: unknown.

        E2E of more users is taken to grow with a power of their number: slower than in proportion, as a larger batch is
        more efficient. Of a rate it is taken to stay.
        """
        known_ms = {load: e2e_ms for load, e2e_ms in measured.items() if e2e_ms}
        if not known_ms or self.search or len(self.variants) > 1:
            return None
        seconds, last = 0.0, max(known_ms)
        for load in self.ladder:
            if load not in measured:
                growth = max(1.0, load / last) ** E2E_GROWTH if self.load_kind == "concurrency" else 1.0
                e2e_s = known_ms[last] * growth / 1000
                waves_s = (self.waves + self.ramp) * e2e_s if self.load_kind == "concurrency" else 0.0
                seconds += self.repeats * max(self.point_s + e2e_s, waves_s)
        return seconds

    def estimate(self) -> "SweepEstimate":
        """Return what the whole sweep costs; the time is a lower bound where the server is slow."""
        requests = sum(map(self.fewest_requests, self.ladder)) * len(self.variants) * self.repeats
        each = None if self.isl is None or self.osl is None else self.isl + self.osl
        return SweepEstimate(
            points=self.most_points,
            requests=requests,
            tokens=None if each is None else requests * each,
            seconds=self.most_points * self.point_s,
        )


@dataclass(frozen=True, kw_only=True)
class PointLoad:
    """Requests and duration of one point."""

    requests: int
    limit_s: float  # after which no request is sent
    ramp_s: float = 0.0  # until the concurrency is reached
    timeout_s: float | None = None  # of a request, where a rate may be beyond the server; null: the usual one
    for_s: float | None = None  # send for this long instead of counting requests, as their speed is unknown


@dataclass(frozen=True, kw_only=True)
class SweepEstimate:
    """Cost of a sweep, before it starts."""

    points: int
    requests: int  # at least
    tokens: int | None
    seconds: float  # at point_s each
