"""A prediction laid beside a measurement: seconds a step of each kind of work and of waiting, like for like.

    compare(measured, view, predicted, other) -> Comparison(measured=59.2, predicted=58.1, rows=(...))

A prediction goes through the first, one middle and the last of many equal rounds. Where it shows fewer rounds of a step
than were measured, its middle round stands for those it leaves out. What covers something else is not compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llmb.perfmodel.offload.stream_timeline import Lane
from llmb.report.timeline.task_kinds import WAIT
from llmb.report.timeline.time_account import Work, account
from llmb.report.timeline.tracks import Timeline
from llmb.report.timeline.views import View, views

Works = dict[tuple[Lane, str], Work]
FEWEST_ROUNDS = 3  # of which the middle one is like those left out
WAITING: tuple[Lane, str] = ("compute", WAIT.name)


@dataclass(frozen=True)
class Comparison:
    """Seconds of a span, for each step in it: the whole, and each kind of work with waiting as one of them."""

    measured: float
    predicted: float
    shown_rounds: int | None  # of a step, where the prediction leaves out some
    rows: tuple[tuple[tuple[Lane, str], float, float], ...]  # kind, measured, predicted


def compare(measured: Timeline, view: View, predicted: Timeline, other: View) -> Comparison | None:
    """Null: the two cover different things."""
    missing = 0
    if view.covers != other.covers:
        rounds = missing_rounds(measured, predicted)
        if view.name not in ("training_overview", "step_overview") or rounds is None:
            return None
        missing = rounds
    here = _works(measured, view)
    there = with_rounds(_works(predicted, other), predicted, missing)
    more = missing * _middle_round(predicted).seconds if missing else 0.0
    return Comparison(
        measured=view.seconds / view.steps,
        predicted=other.seconds / other.steps + more,
        shown_rounds=predicted.rounds if missing else None,
        rows=_rows(here, there),
    )


def missing_rounds(measured: Timeline, predicted: Timeline) -> int | None:
    """How many rounds of a step a prediction leaves out; null: it cannot stand for what was measured."""
    missing = measured.rounds - predicted.rounds
    return missing if missing == 0 or (missing > 0 and predicted.rounds >= FEWEST_ROUNDS) else None


def with_rounds(works: Works, timeline: Timeline, missing: int) -> Works:
    """The work of a step with its middle round so many times more."""
    if not missing:
        return works
    between = _works(timeline, _middle_round(timeline))
    more = {key: work.times(missing) for key, work in between.items()}
    return {key: works.get(key, Work()).plus(more.get(key, Work())) for key in {**works, **more}}


def _works(timeline: Timeline, view: View) -> Works:
    """Of a span, for each step in it."""
    found = account(timeline, view.start, view.end)
    works = {**found.works, WAITING: Work(len(found.waits), found.waiting)}
    return {key: work.times(1 / view.steps) for key, work in works.items()}


def _middle_round(timeline: Timeline) -> View:
    return next(view for view in views(timeline) if view.name == "round_overview")


def _rows(here: Works, there: Works) -> tuple[tuple[tuple[Lane, str], float, float], ...]:
    """Where only one tells recomputing from the backward pass, the two are one."""
    if (("compute", "recompute") in here) != (("compute", "recompute") in there):
        here, there = _joined(here), _joined(there)
    seconds = [(key, here.get(key, Work()).seconds, there.get(key, Work()).seconds) for key in {**here, **there}]
    return tuple(sorted(seconds))


def _joined(works: Mapping[tuple[Lane, str], Work]) -> Works:
    again, back = works.get(("compute", "recompute"), Work()), works.get(("compute", "backward"), Work())
    return {**{k: w for k, w in works.items() if k[1] != "recompute"}, ("compute", "backward"): back.plus(again)}
