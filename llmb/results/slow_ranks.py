"""Detection of slow ranks: those that all others wait for, from the busy time each rank records.

    slow_ranks(events, window=(35, 44), step_s=0.5, stage_ranks=8) -> (SlowRank(rank=5, host="n3", ...),)

Step times are equal on all ranks, since all wait for the slowest; what differs is the busy time within a step
(`StepDone.busy_s`). A rank is compared with the median of the others of its pipeline stage, as another stage may have
more to do. A single hiccup does not make a rank slow: it has to be behind in three of four steps, by a
fifth of the others' busy time and by a tenth of the step.
"""

from bisect import bisect_left
from collections.abc import Iterable
from statistics import median

from llmb.events import Event, RunStarted, StepDone
from llmb.results.recorded_events import events_of
from llmb.results.result import SlowRank

FEW_STEPS = 5  # fewer are not conclusive
MORE_WORK = 0.2  # than the median of the others; less is noise
OF_THE_STEP = 0.1  # the same surplus, over the step time; less is not worth a word
MOST_STEPS = 0.75  # in which it is behind by that much


def slow_ranks(
    events: Iterable[Event], window: tuple[int, int], step_s: float, stage_ranks: int
) -> tuple[SlowRank, ...]:
    """Return the ranks that delay the others over the steps of the window, in order."""
    work_s: dict[tuple[int, int], dict[int, float]] = {}  # busy seconds by (stage, step), then by rank
    hosts = {event.rank: event.host for event in events_of(events, RunStarted)}
    steps = events_of(events, StepDone)
    if len({step.rank for step in steps}) == 1:
        return ()
    for step in steps:
        if step.busy_s is not None and window[0] <= step.step <= window[1]:
            work_s.setdefault((step.rank // stage_ranks, step.step), {})[step.rank] = step.busy_s
    compared: dict[int, list[tuple[float, float]]] = {}  # by rank: busy time and that of the others, for every step
    for work in work_s.values():
        ordered = sorted(work.values())
        for rank, seconds in work.items():
            if len(work) > 1:
                compared.setdefault(rank, []).append((seconds, _median_without(ordered, seconds)))
    candidates = (_slow_rank(rank, compared[rank], step_s, hosts.get(rank)) for rank in sorted(compared))
    return tuple(slow for slow in candidates if slow is not None)


def _median_without(ordered: list[float], value: float) -> float:
    """Return the median of the other values, without sorting once for each of a thousand ranks."""
    index, others = bisect_left(ordered, value), len(ordered) - 1
    low, high = (middle + (middle >= index) for middle in ((others - 1) // 2, others // 2))
    return (ordered[low] + ordered[high]) / 2


def _slow_rank(rank: int, compared: list[tuple[float, float]], step_s: float, host: str | None) -> SlowRank | None:
    """Compare a rank with the others of its stage, step by step; None if it is not slow, or too few steps."""
    if len(compared) < FEW_STEPS:
        return None
    own_s, usual_s = (median(seconds) for seconds in zip(*compared, strict=True))
    least = max(MORE_WORK * usual_s, OF_THE_STEP * step_s)
    behind = sum(busy_s - others_s > least for busy_s, others_s in compared)
    if usual_s <= 0 or own_s - usual_s <= least or behind < MOST_STEPS * len(compared):
        return None
    return SlowRank(rank=rank, host=host, own_s=own_s, usual_s=usual_s, ratio=own_s / usual_s)
