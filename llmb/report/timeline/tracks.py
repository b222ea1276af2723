"""Lanes put in order once for all pictures: what each lane did in turn, when it was busy, when compute waited.

    Timeline.of(lanes).waits -> (Wait(start=1.2, end=1.221, copy=Stretch(...)), ...)

A wait ends when compute resumes, and is laid to the copy that ends at that moment. All ends with the last computation:
what is still copied then would be hidden by the next step, which is not shown.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmb.perfmodel.offload.stream_timeline import LANES, Lane, Lanes, Stretch
from llmb.report.timeline.named_ranges import LEVELS, Level, Range, ranges

Interval = tuple[float, float]
GIB = 2**30
SLACK_S = 20e-6  # by which the clocks of two lanes may differ
SLACK_SHARE = 0.1  # of a wait, between the copy's end and the first work after it


@dataclass(frozen=True)
class Wait:
    """The compute lane stands still; `copy` ends when it goes on. Null: none does, so a launch or the host was late."""

    start: float
    end: float
    copy: Stretch | None


@dataclass(frozen=True)
class Timeline:
    """Lanes put in order once, for all pictures."""

    lanes: Lanes
    start: float
    end: float
    of_lane: dict[Lane, tuple[Stretch, ...]]  # by start
    busy: dict[Lane, tuple[Interval, ...]]  # without overlaps
    waits: tuple[Wait, ...]
    ranges: dict[Level, tuple[Range, ...]]
    device_gib: tuple[tuple[float, float], ...]  # (time, in use), by time
    host_gib: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, lanes: Lanes) -> "Timeline":
        by_start = sorted(lanes.stretches, key=lambda s: (s.start, s.end))
        of_lane: dict[Lane, tuple[Stretch, ...]] = {n: tuple(s for s in by_start if s.lane == n) for n in LANES}
        busy = {name: union((s.start, s.end) for s in stretches) for name, stretches in of_lane.items()}
        copies = (*of_lane["outbound"], *of_lane["inbound"])  # of two that end together the later named is the cause
        start, end = _bounds(busy)
        memory = sorted(lanes.memory, key=lambda use: use.time)
        return cls(
            lanes=lanes,
            start=start,
            end=end,
            of_lane=of_lane,
            busy=busy,
            waits=_waits(busy["compute"], copies, start, end),
            ranges={level: ranges(of_lane["compute"], level) for level in LEVELS},
            device_gib=tuple((use.time, use.device_bytes / GIB) for use in memory),
            host_gib=tuple((use.time, use.host_bytes / GIB) for use in memory),
        )

    @property
    def steps(self) -> int:
        return len(self.ranges["step"])

    @property
    def rounds(self) -> int:
        """Of one step, a middle one."""
        step = self.ranges["step"][(self.steps - 1) // 2]
        return sum(step.start <= r.start and r.end <= step.end for r in self.ranges["round"])

    def counts(self, lane: Lane) -> bool:
        """Whether the work of a lane says how much it was; if not, its rate is unknown rather than 0."""
        stretches = self.of_lane[lane]
        return not stretches or any(s.flops if lane == "compute" else s.bytes for s in stretches)


def _bounds(busy: dict[Lane, tuple[Interval, ...]]) -> Interval:
    """From the first computation, or the first copy in that it may wait for, to the last computation."""
    if not busy["compute"]:
        return 0.0, 0.0
    start, end = busy["compute"][0][0], busy["compute"][-1][1]
    fetched = [max(0.0, a) for a, _ in busy["inbound"][:1]]  # at 0 the first step began
    return min([start, *fetched]), end


def _waits(busy: Sequence[Interval], copies: Iterable[Stretch], start: float, end: float) -> tuple[Wait, ...]:
    by_end = sorted(copies, key=lambda s: s.end)
    ends = [s.end for s in by_end]
    borders = [start, *(t for pair in busy for t in pair), end]
    gaps = [(a, b) for a, b in zip(borders[::2], borders[1::2], strict=True) if b > a]
    return tuple(Wait(a, b, _cause(a, b, by_end, ends)) for a, b in gaps)


def _cause(start: float, end: float, by_end: Sequence[Stretch], ends: Sequence[float]) -> Stretch | None:
    last = bisect_right(ends, end + SLACK_S) - 1
    if last < 0:
        return None
    copy = by_end[last]
    late = end - copy.end
    return copy if copy.end > start and late <= max(SLACK_S, SLACK_SHARE * (end - start)) else None


def union(pairs: Iterable[Interval]) -> tuple[Interval, ...]:
    """Intervals sorted by start, with those that touch or overlap made one."""
    merged: list[Interval] = []
    for start, end in pairs:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def clip(pairs: Iterable[Interval], start: float, end: float) -> list[Interval]:
    return [(max(a, start), min(b, end)) for a, b in pairs if b > start and a < end]


def total(pairs: Iterable[Interval]) -> float:
    return sum(end - start for start, end in pairs)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds in both; each without overlaps of its own."""
    seconds, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        seconds += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return seconds
