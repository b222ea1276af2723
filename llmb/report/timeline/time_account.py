"""Breakdown of an interval of time: what was busy, what was hidden behind compute, what the GPU waited for.

    time_breakdown(timeline, start, end).waiting -> 0.0209 seconds

Events that cross the boundary of an interval count with the part of them that lies inside.
"""

from collections import defaultdict
from dataclasses import dataclass

from llmb.perfmodel.offload.stream_timeline import StreamName
from llmb.report.timeline.tracks import Timeline, Wait, clip, overlap, total


@dataclass
class WorkTotals:
    """Totals of one kind of work in an interval."""

    count: float = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def times(self, factor: float) -> "WorkTotals":
        return WorkTotals(self.count * factor, self.seconds * factor, self.flops * factor, self.bytes * factor)

    def plus(self, other: "WorkTotals") -> "WorkTotals":
        return WorkTotals(
            self.count + other.count, self.seconds + other.seconds, self.flops + other.flops, self.bytes + other.bytes
        )

    @property
    def rate(self) -> tuple[float, str] | None:
        """Rate and unit; null where it neither computes nor copies anything that is counted."""
        if self.seconds <= 0 or not (self.flops or self.bytes):
            return None
        return (
            (self.flops / self.seconds / 1e12, "TFLOP/s") if self.flops else (self.bytes / self.seconds / 1e9, "GB/s")
        )


@dataclass(frozen=True)
class TimeBreakdown:
    """Figures of one interval of time."""

    seconds: float
    busy: dict[StreamName, float]  # seconds
    hidden: float  # seconds of copying while compute was busy, both directions added
    work_by_kind: dict[tuple[StreamName, str], WorkTotals]
    waits: tuple[Wait, ...]  # the part of each that lies inside

    @property
    def copying(self) -> float:
        return self.busy["inbound"] + self.busy["outbound"]

    @property
    def waiting(self) -> float:
        return sum(wait.end - wait.start for wait in self.waits)

    @property
    def tflops(self) -> float | None:
        """Rate over the whole interval, waits included; null where no event has FLOPs."""
        flops = sum(work.flops for work in self.work_by_kind.values())
        return flops / self.seconds / 1e12 if flops else None

    def seconds_of(self, stream: StreamName, name: str) -> float:
        return self.work_by_kind[stream, name].seconds if (stream, name) in self.work_by_kind else 0.0


def time_breakdown(timeline: Timeline, start: float, end: float) -> TimeBreakdown:
    """Return the breakdown between two moments."""
    work_by_kind: dict[tuple[StreamName, str], WorkTotals] = defaultdict(WorkTotals)
    for event in timeline.streams.events:
        inside = min(event.end, end) - max(event.start, start)
        if inside <= 0:
            continue
        fraction = inside / (event.end - event.start)
        work = work_by_kind[event.stream, event.name]
        work.count += 1
        work.seconds += inside
        work.flops += fraction * event.flops
        work.bytes += fraction * event.bytes
    busy = {stream: clip(timeline.busy[stream], start, end) for stream in timeline.shown_streams}
    cut = (Wait(max(w.start, start), min(w.end, end), w.copy) for w in timeline.waits)
    return TimeBreakdown(
        seconds=end - start,
        busy={stream: total(pairs) for stream, pairs in busy.items()},
        hidden=overlap(busy["inbound"], busy["compute"]) + overlap(busy["outbound"], busy["compute"]),
        work_by_kind=dict(work_by_kind),
        waits=tuple(w for w in cut if w.end > w.start),
    )
