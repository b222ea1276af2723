"""Measured points of a sweep, and the rows of its table: repeats of one load merged into medians.

A point is one measurement: a load (concurrency or rate) on one variant (the settings that the sweep varies). Points are
stored one line each as they finish; rows and everything else are derived from them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from llmb.results.repeats import Interval, interval
from llmb.results.result import Result
from llmb.results.sweep.slo import STATISTICS

LoadKind = Literal["concurrency", "rate"]
LOAD_UNITS: dict[LoadKind, str] = {"concurrency": "requests at once", "rate": "requests/s"}
UNUSABLE = ("failed", "oom", "timeout", "incomplete", "diverged")  # statuses without figures to rely on
CLIENT_WARNINGS = ("CLIENT_BOUND", "CLIENT_LATE", "CLIENT_REFUSED")  # the client was measured, not the server
SUMMARIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
FIGURES = (
    "request_throughput", "output_tokens_per_s", "output_tokens_per_s_per_gpu", "steady_output_tokens_per_s",
    "output_tokens_per_s_per_user", "output_speed_tokens_per_s", "total_tokens_per_s", "mean_concurrency",
    "kv_peak_use", "output_tokens_per_joule", "goodput_requests_per_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PointKey:
    """Identity of a point within its sweep."""

    load_kind: LoadKind
    load: float
    variant: str = ""  # settings that the sweep varies: max_num_tokens=2048
    repeat: int = 1

    @property
    def name(self) -> str:
        """Name of the point's folder."""
        words = [self.variant, f"{self.load_kind}{self.load:.12g}", f"r{self.repeat}"]
        return "_".join(word.replace("/", "-").replace("=", "-") for word in words if word)


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One finished measurement."""

    key: PointKey
    result: Result
    folder: str  # of its events, relative to the sweep's
    wall_s: float
    client_refusal: str | None = None  # why the client refused a verdict: it was too late, not the server too slow
    client: dict[str, Any] = field(default_factory=dict)  # cost of the client: CPU, lateness


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """Figures of one load on one variant: medians over its repeats."""

    variant: str
    load_kind: LoadKind
    load: float
    repeats: int
    requests: int | None
    requests_failed: int | None
    lengths_wrong: int | None = None  # outputs of another length than requested
    prefix_cached: str | None = (
        None  # how much more of the prompts was cached than they share; null: nothing, or unknown
    )
    request_throughput: float | None = None
    output_tokens_per_s: float | None = None
    output_tokens_per_s_per_gpu: float | None = None
    steady_output_tokens_per_s: float | None = None
    output_tokens_per_s_per_user: float | None = None
    output_speed_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    mean_concurrency: float | None = None
    kv_peak_use: float | None = None
    output_tokens_per_joule: float | None = None
    goodput_requests_per_s: float | None = None
    ttft_ms: dict[str, float] | None = None
    tpot_ms: dict[str, float] | None = None
    itl_ms: dict[str, float] | None = None
    e2e_ms: dict[str, float] | None = None
    noise: Interval | None = None  # of output tokens/s over the repeats
    excluded: str | None = None  # why it is in no Pareto set; null: it may be
    wall_s: float = 0.0  # all repeats together


def exclusion(point: SweepPoint) -> str | None:
    """Return why a point says nothing of the server, or None."""
    if point.client_refusal:
        return f"client: {point.client_refusal}"
    if point.result.status in UNUSABLE:
        return f"{point.result.status}: {point.result.reason or 'no reason is recorded'}"
    return next((f"client: {w.text}" for w in point.result.warnings if w.code in CLIENT_WARNINGS), None)


def sweep_rows(points: Iterable[SweepPoint]) -> list[SweepRow]:
    """Return a row for each load on each variant, by variant in order of appearance and then by load."""
    groups: dict[tuple[str, LoadKind, float], list[SweepPoint]] = {}
    for point in points:
        groups.setdefault((point.key.variant, point.key.load_kind, point.key.load), []).append(point)
    variants = list(dict.fromkeys(variant for variant, _, _ in groups))
    order = sorted(groups, key=lambda group: (variants.index(group[0]), group[1], group[2]))
    return [_row(groups[group]) for group in order]


def _row(points: Sequence[SweepPoint]) -> SweepRow:
    """Merge the repeats of one load; repeats without a usable figure count only where none has one."""
    key = points[0].key
    usable = [point for point in points if exclusion(point) is None]
    results = [point.result for point in usable or points]
    rates = [r.output_tokens_per_s for r in results if r.output_tokens_per_s is not None]
    fields: dict[str, Any] = {name: _median([getattr(result, name, None) for result in results]) for name in FIGURES}
    fields |= {name: _summary(results, name) for name in SUMMARIES}
    return SweepRow(
        variant=key.variant,
        load_kind=key.load_kind,
        load=key.load,
        repeats=len(points),
        requests=_total(results, "requests"),
        requests_failed=_total([point.result for point in points], "requests_failed"),
        lengths_wrong=_total(results, "lengths_wrong"),
        prefix_cached=next((w.text for r in results for w in r.warnings if w.code == "PREFIX_CACHED"), None),
        noise=interval("output tokens/s", rates),
        excluded=None if usable else exclusion(points[0]),
        wall_s=sum(point.wall_s for point in points),
        **fields,
    )


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, or None where a repeat has no value."""
    numbers = [value for value in values if value is not None]
    return float(median(numbers)) if numbers and len(numbers) == len(values) else None


def _summary(results: Sequence[Result], name: str) -> dict[str, float] | None:
    summaries = [getattr(result, name) or {} for result in results]
    statistics = {s: _median([summary.get(s) for summary in summaries]) for s in STATISTICS}
    return {statistic: value for statistic, value in statistics.items() if value is not None} or None


def _total(results: Sequence[Result], name: str) -> int | None:
    counts = [count for count in (getattr(result, name) for result in results) if count is not None]
    return sum(counts) if counts else None
