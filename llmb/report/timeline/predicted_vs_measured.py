"""Comparison of a prediction with a measurement: seconds per step of each kind of work and of waiting.

    compare(measured, view, predicted, predicted_view) -> TimelineComparison(measured=59.2, predicted=58.1, rows=(...))

A prediction simulates the first, one middle and the last of many equal rounds. Where it has fewer rounds per step than
were measured, its middle round counts for those it leaves out. Intervals that cover different work are not compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llmb.perfmodel.offload.stream_timeline import StreamName
from llmb.report.timeline.task_kinds import WAIT
from llmb.report.timeline.time_account import WorkTotals, time_breakdown
from llmb.report.timeline.tracks import Timeline
from llmb.report.timeline.views import View, views

WorkByKind = dict[tuple[StreamName, str], WorkTotals]
MIN_ROUNDS = 3  # so that the middle one is like those left out
WAITING: tuple[StreamName, str] = ("compute", WAIT.name)


@dataclass(frozen=True)
class TimelineComparison:
    """Seconds of an interval, per step: in total, and for each kind of work with waiting as one of them."""

    measured: float
    predicted: float
    shown_rounds: int | None  # of a step, where the prediction leaves out some
    rows: tuple[tuple[tuple[StreamName, str], float, float], ...]  # kind, measured, predicted


def compare(measured: Timeline, view: View, predicted: Timeline, predicted_view: View) -> TimelineComparison | None:
    """Return the comparison; null: the two cover different work."""
    missing = 0
    if view.covers != predicted_view.covers:
        rounds = missing_rounds(measured, predicted)
        if view.name not in ("training_overview", "step_overview") or rounds is None:
            return None
        missing = rounds
    measured_work = _work_of(measured, view)
    predicted_work = with_rounds(_work_of(predicted, predicted_view), predicted, missing)
    extra_s = missing * _middle_round(predicted).seconds if missing else 0.0
    return TimelineComparison(
        measured=view.seconds / view.steps,
        predicted=predicted_view.seconds / predicted_view.steps + extra_s,
        shown_rounds=predicted.rounds if missing else None,
        rows=_rows(measured_work, predicted_work),
    )


def missing_rounds(measured: Timeline, predicted: Timeline) -> int | None:
    """Return how many rounds of a step a prediction leaves out; null: it cannot represent what was measured."""
    missing = measured.rounds - predicted.rounds
    return missing if missing == 0 or (missing > 0 and predicted.rounds >= MIN_ROUNDS) else None


def with_rounds(work_by_kind: WorkByKind, timeline: Timeline, missing: int) -> WorkByKind:
    """Return the work of a step with its middle round so many times more."""
    if not missing:
        return work_by_kind
    between = _work_of(timeline, _middle_round(timeline))
    extra_s = {key: work.times(missing) for key, work in between.items()}
    return {
        key: work_by_kind.get(key, WorkTotals()).plus(extra_s.get(key, WorkTotals()))
        for key in {**work_by_kind, **extra_s}
    }


def _work_of(timeline: Timeline, view: View) -> WorkByKind:
    """Return the work in a view, per step."""
    breakdown = time_breakdown(timeline, view.start, view.end)
    work_by_kind = {**breakdown.work_by_kind, WAITING: WorkTotals(len(breakdown.waits), breakdown.waiting)}
    return {key: work.times(1 / view.steps) for key, work in work_by_kind.items()}


def _middle_round(timeline: Timeline) -> View:
    return next(view for view in views(timeline) if view.name == "round_overview")


def _rows(
    measured_work: WorkByKind, predicted_work: WorkByKind
) -> tuple[tuple[tuple[StreamName, str], float, float], ...]:
    """Return the rows; where only one distinguishes recomputation from backward, the two are merged."""
    if (("compute", "recompute") in measured_work) != (("compute", "recompute") in predicted_work):
        measured_work, predicted_work = _merge_recompute(measured_work), _merge_recompute(predicted_work)
    seconds = [
        (key, measured_work.get(key, WorkTotals()).seconds, predicted_work.get(key, WorkTotals()).seconds)
        for key in {**measured_work, **predicted_work}
    ]
    return tuple(sorted(seconds))


def _merge_recompute(work_by_kind: Mapping[tuple[StreamName, str], WorkTotals]) -> WorkByKind:
    recompute, backward = (
        work_by_kind.get(("compute", "recompute"), WorkTotals()),
        work_by_kind.get(("compute", "backward"), WorkTotals()),
    )
    return {
        **{k: w for k, w in work_by_kind.items() if k[1] != "recompute"},
        ("compute", "backward"): backward.plus(recompute),
    }
