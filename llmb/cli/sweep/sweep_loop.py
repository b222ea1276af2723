"""Loop of a sweep: choose the next point, measure it, store it, write the reports; from any state, as after a kill.

Points come from points.jsonl alone, and the next one follows from plan and points. So a sweep that was killed at any
moment continues with the same points as one that was not, and no finished point is measured again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmb.config.serialization import build, to_json, write_atomic
from llmb.loadgen.sweep.sweep_folder import SweepFolder
from llmb.loadgen.sweep.sweep_plan import PointLoad, SweepPlan
from llmb.report.pareto_chart import pareto_chart
from llmb.report.sweep_table import sweep_csv
from llmb.results.result import Result
from llmb.results.sweep.slo import SloLimit, parse_slo
from llmb.results.sweep.sweep_points import PointKey, SweepPoint, sweep_rows
from llmb.results.sweep.sweep_result import SweepResult, conclude, judgements

ATTEMPTS = 2  # at a point of a search whose client was late


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One point as its driver returns it."""

    result: Result
    client_refusal: str | None = None
    client: dict[str, Any] | None = None


class PointDriver(Protocol):
    """A way to measure points: over HTTP, or by the engine in a process of its own."""

    def prepare(self, key: PointKey) -> None:
        """Start what the point needs; its time does not count."""
        ...

    def measure(self, key: PointKey, load: PointLoad, folder: Path) -> Measurement:
        """Measure one point and leave its events in `folder`."""
        ...


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """Plan and points of a sweep."""

    plan: SweepPlan
    points: tuple[SweepPoint, ...]

    @classmethod
    def read(cls, folder: SweepFolder, plan: SweepPlan) -> "SweepState":
        lines = folder.read_points()
        return cls(plan=plan, points=tuple(build(SweepPoint, line, str(folder.points)) for line in lines))

    @property
    def tiers(self) -> dict[str, tuple[SloLimit, ...]]:
        return {name: parse_slo(text) for name, text in self.plan.tiers.items()}

    def next_key(self) -> PointKey | None:
        """Return the next point, or None when the sweep is finished."""
        for variant in self.plan.variants:
            if (key := self._next_of(variant)) is not None:
                return key
        return None

    def _next_of(self, variant: str) -> PointKey | None:
        kind = self.plan.load_kind
        points = [point for point in self.points if point.key.variant == variant]
        repeats = {point.key.load: 0 for point in points}
        for point in points:
            repeats[point.key.load] += 1
        load = next((load for load, count in repeats.items() if count < self.plan.repeats), None)
        if load is None:
            rows = sweep_rows(points)
            judged = [judgements(rows, variant, limits) for limits in self.tiers.values()]
            load = self.plan.next_load(list(repeats), judged)
        if load is None:
            return None
        return PointKey(load_kind=kind, load=load, variant=variant, repeat=repeats.get(load, 0) + 1)

    def point_load(self, key: PointKey) -> PointLoad:
        """Return what a point sends, from the figures of those before it."""
        earlier = {
            point.key.load: (point.result.request_throughput, (point.result.e2e_ms or {}).get("p50"))
            for point in self.points
            if point.key.variant == key.variant
        }
        return self.plan.point_load(key.load, earlier)

    def conclude(self, finished: bool) -> SweepResult:
        plan = self.plan
        return conclude(plan.name, self.points, self.tiers, plan.gpus, finished, plan.target)


def run_sweep(
    plan: SweepPlan,
    folder: SweepFolder,
    driver: PointDriver,
    on_start: Callable[[PointKey, PointLoad, Sequence[SweepPoint]], None] = lambda *_: None,
    on_done: Callable[[SweepPoint, SweepResult], None] = lambda *_: None,
) -> SweepResult:
    """Measure all points that are left; return the result of the sweep."""
    state = SweepState.read(folder, plan)
    while (key := state.next_key()) is not None:
        driver.prepare(key)
        load = state.point_load(key)
        on_start(key, load, state.points)
        start, attempts = time.monotonic(), ATTEMPTS if plan.search else 1
        for _ in range(attempts):  # a search would take a moment's lateness of the client for the server's limit
            point_folder = folder.point_folder(key.name)
            measured = driver.measure(key, load, point_folder)
            if measured.client_refusal is None:
                break
        point = SweepPoint(
            key=key,
            result=measured.result,
            folder=str(point_folder.relative_to(folder.path)),
            wall_s=time.monotonic() - start,
            client_refusal=measured.client_refusal,
            client=measured.client or {},
        )
        folder.append_point(point)
        state = SweepState(plan=plan, points=(*state.points, point))
        on_done(point, write_reports(folder, state.conclude(finished=state.next_key() is None)))
    return write_reports(folder, state.conclude(finished=True))


def write_reports(folder: SweepFolder, result: SweepResult) -> SweepResult:
    """Write result.json, sweep.csv and sweep.svg, each whole or not at all."""
    write_atomic(folder.result, to_json(result, indent=2) + "\n")
    write_atomic(folder.csv, sweep_csv(result))
    write_atomic(folder.svg, pareto_chart(result))
    return result
