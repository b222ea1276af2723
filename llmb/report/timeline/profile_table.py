"""The table of a profile: each kind of work with its count, seconds and rate a step, predicted beside measured."""

import math
from dataclasses import dataclass
from html import escape

from llmb.perfmodel.offload.stream_timeline import Lane
from llmb.report.timeline.axis_units import difference, duration, figures, percent
from llmb.report.timeline.predicted_vs_measured import WAITING, Works, missing_rounds, with_rounds
from llmb.report.timeline.task_kinds import LANE_LABELS, kind, order
from llmb.report.timeline.time_account import Work, account
from llmb.report.timeline.tracks import Timeline

_NONE = "\u2013"


@dataclass(frozen=True)
class Row:
    """One kind of work, as it is printed."""

    lane: Lane
    name: str
    cells: tuple[str, ...]


def table(measured: Timeline, predicted: Timeline | None) -> str:
    """As HTML."""
    head = ["Lane", "Work", "Count a step", "Time a step", "Share of step", "Rate"]
    head += ["Predicted time", "Predicted rate", "Difference"] if predicted else []
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(map(_html, rows(measured, predicted)))
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def rows(measured: Timeline, predicted: Timeline | None) -> list[Row]:
    """All kinds of either, by lane; waits close the compute lane."""
    here, there = _a_step(measured), _foreseen_step(measured, predicted) if predicted else {}
    step_seconds = (measured.end - measured.start) / measured.steps
    found = []
    for lane, name in sorted({*here, *there}, key=order):
        cells = _own(here.get((lane, name)), step_seconds)
        if predicted:
            cells += _foreseen(there.get((lane, name)), here.get((lane, name)))
        found.append(Row(lane, name, cells))
    return found


def _a_step(timeline: Timeline) -> Works:
    """The work of a mean step; copies after the last computation belong to it too."""
    works = account(timeline, -math.inf, math.inf).works
    waited = sum(wait.end - wait.start for wait in timeline.waits)
    works[WAITING] = Work(len(timeline.waits), waited)
    return {key: work.times(1 / timeline.steps) for key, work in works.items()}


def _foreseen_step(measured: Timeline, predicted: Timeline) -> Works:
    """With as many rounds as were measured; nothing where it cannot stand for them."""
    missing = missing_rounds(measured, predicted)
    return {} if missing is None else with_rounds(_a_step(predicted), predicted, missing)


def _own(work: Work | None, step_seconds: float) -> tuple[str, ...]:
    if work is None:
        return (_NONE,) * 4
    share = percent(work.seconds / step_seconds).replace("less than", "<")
    return f"{work.count:,.1f}".removesuffix(".0"), duration(work.seconds), share, _rate(work)


def _foreseen(work: Work | None, own: Work | None) -> tuple[str, ...]:
    if work is None:
        return (_NONE,) * 3
    off = _NONE
    if own is not None and work.seconds > 0:
        off = difference(own.seconds / work.seconds)
    return duration(work.seconds), _rate(work), off


def _rate(work: Work) -> str:
    return _NONE if work.rate is None else f"{figures(work.rate[0])} {work.rate[1]}"


def _html(row: Row) -> str:
    look = kind(row.lane, row.name)
    drawn = f'<rect class="{look.css_class}" width="18" height="12"/>'
    swatch = f'<svg class="swatch" viewBox="0 0 18 12" aria-hidden="true">{drawn}</svg>'
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
    return f'<tr><td>{LANE_LABELS[row.lane]}</td><th scope="row">{swatch}{escape(look.label)}</th>{cells}</tr>'
