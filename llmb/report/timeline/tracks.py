"""Timeline sorted once for all pictures: the events of each stream, when it was busy, when compute waited.

    Timeline.of(streams).waits -> (Wait(start=1.2, end=1.221, copy=TimelineEvent(...)), ...)

A wait ends when compute resumes, and is attributed to the copy that ends at that moment. Everything ends with the last
computation: what is still copied then would be hidden by the next step, which is not recorded.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmb.perfmodel.offload.stream_timeline import (
    DEVICE_STREAMS,
    DISK_STREAMS,
    STREAMS,
    StreamName,
    StreamTimeline,
    TimelineEvent,
)
from llmb.report.timeline.named_ranges import RANGE_LEVELS, NamedRange, RangeLevel, ranges

Interval = tuple[float, float]
GIB = 2**30
SLACK_S = 20e-6  # by which the clocks of two streams may differ
SLACK_FRACTION = 0.1  # of a wait, between the copy's end and the first work after it


@dataclass(frozen=True)
class Wait:
    """Idle interval of the compute stream; `copy` ends when it goes on. Null: a launch or the host was late."""

    start: float
    end: float
    copy: TimelineEvent | None


@dataclass(frozen=True)
class Timeline:
    """Sorted timeline, for all pictures."""

    streams: StreamTimeline
    start: float
    end: float
    by_stream: dict[StreamName, tuple[TimelineEvent, ...]]  # by start
    busy: dict[StreamName, tuple[Interval, ...]]  # without overlaps
    waits: tuple[Wait, ...]
    ranges: dict[RangeLevel, tuple[NamedRange, ...]]
    device_gib: tuple[tuple[float, float], ...]  # (time, in use), by time
    host_gib: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, streams: StreamTimeline) -> "Timeline":
        by_start = sorted(streams.events, key=lambda s: (s.start, s.end))
        by_stream: dict[StreamName, tuple[TimelineEvent, ...]] = {
            n: tuple(s for s in by_start if s.stream == n) for n in STREAMS
        }
        busy = {name: union((s.start, s.end) for s in events) for name, events in by_stream.items()}
        copies = (
            *by_stream["outbound"],
            *by_stream["inbound"],
        )  # of two that end together the later named is the cause
        start, end = _bounds(busy)
        memory = sorted(streams.memory, key=lambda use: use.time)
        return cls(
            streams=streams,
            start=start,
            end=end,
            by_stream=by_stream,
            busy=busy,
            waits=_waits(busy["compute"], copies, start, end),
            ranges={level: ranges(by_stream["compute"], level) for level in RANGE_LEVELS},
            device_gib=tuple((use.time, use.device_bytes / GIB) for use in memory),
            host_gib=tuple((use.time, use.host_bytes / GIB) for use in memory),
        )

    @property
    def shown_streams(self) -> tuple[StreamName, ...]:
        """Streams that pictures have: those of a disk only where one is used."""
        return STREAMS if any(self.by_stream[stream] for stream in DISK_STREAMS) else DEVICE_STREAMS

    @property
    def steps(self) -> int:
        return len(self.ranges["step"])

    @property
    def rounds(self) -> int:
        """Rounds of one step, a middle one."""
        step = self.ranges["step"][(self.steps - 1) // 2]
        return sum(step.start <= r.start and r.end <= step.end for r in self.ranges["round"])

    def has_amounts(self, stream: StreamName) -> bool:
        """Return whether the events of a stream have FLOPs or bytes; if not, its rate is unknown rather than 0."""
        events = self.by_stream[stream]
        return not events or any(s.flops if stream == "compute" else s.bytes for s in events)


def _bounds(busy: dict[StreamName, tuple[Interval, ...]]) -> Interval:
    """Return the interval from the first computation, or the copy that it may wait for, to the last computation."""
    if not busy["compute"]:
        return 0.0, 0.0
    start, end = busy["compute"][0][0], busy["compute"][-1][1]
    first_copies = [max(0.0, a) for a, _ in busy["inbound"][:1]]  # at 0 the first step began
    return min([start, *first_copies]), end


def _waits(busy: Sequence[Interval], copies: Iterable[TimelineEvent], start: float, end: float) -> tuple[Wait, ...]:
    by_end = sorted(copies, key=lambda s: s.end)
    ends = [s.end for s in by_end]
    borders = [start, *(t for pair in busy for t in pair), end]
    gaps = [(a, b) for a, b in zip(borders[::2], borders[1::2], strict=True) if b > a]
    return tuple(Wait(a, b, _cause(a, b, by_end, ends)) for a, b in gaps)


def _cause(start: float, end: float, by_end: Sequence[TimelineEvent], ends: Sequence[float]) -> TimelineEvent | None:
    last = bisect_right(ends, end + SLACK_S) - 1
    if last < 0:
        return None
    copy = by_end[last]
    late = end - copy.end
    return copy if copy.end > start and late <= max(SLACK_S, SLACK_FRACTION * (end - start)) else None


def union(pairs: Iterable[Interval]) -> tuple[Interval, ...]:
    """Merge intervals sorted by start that touch or overlap."""
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


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the seconds in both; each without overlaps of its own."""
    seconds, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        seconds += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return seconds
