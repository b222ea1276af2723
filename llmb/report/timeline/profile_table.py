"""Table of a profile: each kind of work with its count, seconds and rate per step, predicted beside measured."""

import math
from dataclasses import dataclass
from html import escape

from llmb.perfmodel.offload.stream_timeline import StreamName
from llmb.report.timeline.axis_units import difference, duration, figures, percent
from llmb.report.timeline.predicted_vs_measured import WAITING, WorkByKind, missing_rounds, with_rounds
from llmb.report.timeline.task_kinds import STREAM_LABELS, order, work_kind
from llmb.report.timeline.time_account import WorkTotals, time_breakdown
from llmb.report.timeline.tracks import Timeline

_NONE = "\u2013"


@dataclass(frozen=True)
class ProfileRow:
    """One kind of work, as it is printed."""

    stream: StreamName
    name: str
    cells: tuple[str, ...]


def table(measured: Timeline, predicted: Timeline | None) -> str:
    """Return the table as HTML."""
    head = ["Stream", "Work", "Count per step", "Time per step", "Fraction of step", "Rate"]
    head += ["Predicted time", "Predicted rate", "Difference"] if predicted else []
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(map(_html, rows(measured, predicted)))
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def rows(measured: Timeline, predicted: Timeline | None) -> list[ProfileRow]:
    """Return all kinds of either timeline, by stream; waits are the last of the compute stream."""
    measured_work, predicted_work = _mean_step(measured), _predicted_step(measured, predicted) if predicted else {}
    step_seconds = (measured.end - measured.start) / measured.steps
    table_rows = []
    for stream, name in sorted({*measured_work, *predicted_work}, key=order):
        cells = _measured_cells(measured_work.get((stream, name)), step_seconds)
        if predicted:
            cells += _predicted_cells(predicted_work.get((stream, name)), measured_work.get((stream, name)))
        table_rows.append(ProfileRow(stream, name, cells))
    return table_rows


def _mean_step(timeline: Timeline) -> WorkByKind:
    """Return the work of a mean step, copies after the last computation included."""
    work_by_kind = time_breakdown(timeline, -math.inf, math.inf).work_by_kind
    waiting_s = sum(wait.end - wait.start for wait in timeline.waits)
    work_by_kind[WAITING] = WorkTotals(len(timeline.waits), waiting_s)
    return {key: work.times(1 / timeline.steps) for key, work in work_by_kind.items()}


def _predicted_step(measured: Timeline, predicted: Timeline) -> WorkByKind:
    """Return the predicted step with as many rounds as were measured; empty where it cannot represent them."""
    missing = missing_rounds(measured, predicted)
    return {} if missing is None else with_rounds(_mean_step(predicted), predicted, missing)


def _measured_cells(work: WorkTotals | None, step_seconds: float) -> tuple[str, ...]:
    if work is None:
        return (_NONE,) * 4
    fraction = percent(work.seconds / step_seconds).replace("less than", "<")
    return f"{work.count:,.1f}".removesuffix(".0"), duration(work.seconds), fraction, _rate(work)


def _predicted_cells(work: WorkTotals | None, measured_work: WorkTotals | None) -> tuple[str, ...]:
    if work is None:
        return (_NONE,) * 3
    change = _NONE
    if measured_work is not None and work.seconds > 0:
        change = difference(measured_work.seconds / work.seconds)
    return duration(work.seconds), _rate(work), change


def _rate(work: WorkTotals) -> str:
    return _NONE if work.rate is None else f"{figures(work.rate[0])} {work.rate[1]}"


def _html(row: ProfileRow) -> str:
    kind = work_kind(row.stream, row.name)
    rect = f'<rect class="{kind.css_class}" width="18" height="12"/>'
    swatch = f'<svg class="swatch" viewBox="0 0 18 12" aria-hidden="true">{rect}</svg>'
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
    return f'<tr><td>{STREAM_LABELS[row.stream]}</td><th scope="row">{swatch}{escape(kind.label)}</th>{cells}</tr>'
