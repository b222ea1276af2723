"""Result of a sweep: its rows, Pareto set, knee, and the highest load of each SLO tier. Derived from points alone.

    conclude(name, points, tiers, gpus) -> SweepResult

Pareto set: output tokens/s per GPU (of the whole server where the number of GPUs is unknown) against tokens/s/user,
n / E2E with waiting included. Excluded rows (the client was late, the run failed) are in neither set nor knee.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmb.perfmodel.tune.pareto import knee, pareto_set
from llmb.results.sweep.slo import SloLimit, broken_limits
from llmb.results.sweep.sweep_points import LoadKind, SweepPoint, SweepRow, sweep_rows


@dataclass(frozen=True, kw_only=True)
class TierAnswer:
    """Highest measured load that holds the limits of a tier, on one variant."""

    tier: str
    limits: tuple[SloLimit, ...]
    variant: str
    load_kind: LoadKind
    load: float | None  # null: the lowest measured load does not hold
    row: int | None  # of the result
    fails_at: float | None  # lowest measured load that does not hold; null: all do
    broken: tuple[str, ...] = ()  # what it breaks
    contradicted: tuple[float, ...] = ()  # loads above it that hold: noise


@dataclass(frozen=True, kw_only=True)
class ClientCost:
    """Most that the load generator needed at any point."""

    processes: int | None
    cpu_fraction: float | None  # of a core, the busiest process
    loop_lag_p99_ms: float | None  # error of a time stamp


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """One sweep in figures."""

    schema: int = 1
    name: str
    gpus: int | None = None
    finished: bool = False
    rows: tuple[SweepRow, ...] = ()
    pareto: tuple[int, ...] = ()  # indices of rows, from the fastest for one user to the highest throughput
    pareto_x: str = "output_tokens_per_s_per_user"
    pareto_y: str = "output_tokens_per_s_per_gpu"
    knee: int | None = None  # index of a row
    tiers: tuple[TierAnswer, ...] = ()
    points: int = 0
    requests: int | None = None
    wall_s: float = 0.0
    target: str | None = None  # what was measured, in words
    client: ClientCost | None = None  # null: no load generator was used


def conclude(
    name: str,
    points: Iterable[SweepPoint],
    tiers: Mapping[str, tuple[SloLimit, ...]],
    gpus: int | None = None,
    finished: bool = True,
    target: str | None = None,
) -> SweepResult:
    """Derive the result of a sweep from its points."""
    measured = list(points)
    rows = sweep_rows(measured)
    y = "output_tokens_per_s" if gpus is None else "output_tokens_per_s_per_gpu"
    x = "output_tokens_per_s_per_user"
    usable = [
        i for i, row in enumerate(rows)
        if row.excluded is None and getattr(row, x) is not None and getattr(row, y) is not None
    ]  # fmt: skip
    figures = [(getattr(rows[i], x), getattr(rows[i], y)) for i in usable]
    knee_at = knee(figures)
    requests = [row.requests for row in rows if row.requests is not None]
    return SweepResult(
        name=name,
        gpus=gpus,
        finished=finished,
        rows=tuple(rows),
        pareto=tuple(usable[i] for i in pareto_set(figures)),
        pareto_x=x,
        pareto_y=y,
        knee=None if knee_at is None else usable[knee_at],
        tiers=tuple(answer for tier, limits in tiers.items() for answer in _answers(tier, limits, rows)),
        points=len(measured),
        requests=sum(requests) if requests else None,
        wall_s=sum(point.wall_s for point in measured),
        target=target,
        client=_client_cost(measured),
    )


def _client_cost(points: Sequence[SweepPoint]) -> ClientCost | None:
    clients = [point.client for point in points if point.client]
    if not clients:
        return None
    lags = [(client.get("loop_lag_ms") or {}).get("p99") for client in clients]
    return ClientCost(
        processes=_most(client.get("processes") for client in clients),
        cpu_fraction=_most(client.get("cpu_fraction") for client in clients),
        loop_lag_p99_ms=_most(lags),
    )


def _most(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def holds(row: SweepRow, limits: tuple[SloLimit, ...]) -> bool:
    """Return whether a row holds all limits; one that was not measured well does not."""
    return row.excluded is None and not broken_limits(row, limits)


def judgements(rows: Iterable[SweepRow], variant: str, limits: tuple[SloLimit, ...]) -> dict[float, bool]:
    """Return the measured loads of a variant, and whether each holds: what a search continues from."""
    return {row.load: holds(row, limits) for row in rows if row.variant == variant}


def _answers(tier: str, limits: tuple[SloLimit, ...], rows: Sequence[SweepRow]) -> Iterable[TierAnswer]:
    """Yield the answer of each variant; the lowest load that does not hold bounds it."""
    for variant in dict.fromkeys(row.variant for row in rows):
        indices = [i for i, row in enumerate(rows) if row.variant == variant]
        failing = next((i for i in indices if not holds(rows[i], limits)), None)
        passing = [i for i in indices if holds(rows[i], limits)]
        best = max((i for i in passing if failing is None or i < failing), default=None)
        broken = () if failing is None else _reasons(rows[failing], limits)
        yield TierAnswer(
            tier=tier,
            limits=limits,
            variant=variant,
            load_kind=rows[indices[0]].load_kind,
            load=None if best is None else rows[best].load,
            row=best,
            fails_at=None if failing is None else rows[failing].load,
            broken=broken,
            contradicted=tuple(rows[i].load for i in passing if failing is not None and i > failing),
        )


def _reasons(row: SweepRow, limits: tuple[SloLimit, ...]) -> tuple[str, ...]:
    return (row.excluded,) if row.excluded is not None else broken_limits(row, limits)
