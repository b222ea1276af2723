"""Exposed cost of an optimizer step: the time for which the rest of training is stopped.

    optimizer_cost(timeline).exposed -> 0.031 seconds per step

Its kernels run on the compute stream, so all of them are exposed; its copies only where compute waits for them.
"""

from dataclasses import dataclass
from itertools import pairwise

from llmb.report.timeline.tracks import Interval, Timeline, clip, total


@dataclass(frozen=True)
class OptimizerCost:
    """Seconds per step."""

    kernels: float
    waiting: float  # for its copies, and between the last work of one step and the first of the next

    @property
    def exposed(self) -> float:
        return self.kernels + self.waiting


def optimizer_cost(timeline: Timeline) -> OptimizerCost | None:
    """Return the mean over all steps; null where no update is recorded."""
    updates = [s for s in timeline.by_stream["compute"] if s.phase == "update"]
    if not updates:
        return None
    borders = _borders(timeline)
    waiting = 0.0
    for wait in timeline.waits:
        if wait.copy is not None and wait.copy.phase == "update" and wait.end <= borders[-1][1]:
            waiting += wait.end - wait.start
        else:
            waiting += total(clip(borders, wait.start, wait.end))
    return OptimizerCost(sum(s.end - s.start for s in updates) / timeline.steps, waiting / len(borders))


def _borders(timeline: Timeline) -> list[Interval]:
    """Return the intervals from the last other work of each step to the first of the next.

    What follows the last recorded step is left out where there is another: what would have hidden it is not recorded.
    """
    non_updates = [s for s in timeline.by_stream["compute"] if s.phase != "update"]
    between = [(a.end, b.start) for a, b in pairwise(non_updates) if a.step != b.step]
    return between or [(non_updates[-1].end if non_updates else timeline.start, timeline.end)]
