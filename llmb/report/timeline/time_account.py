"""Where the time of a span went: what was busy, what was hidden behind compute, what the GPU waited for.

    account(timeline, start, end).waiting -> 0.0209 seconds

Work that reaches over the border of a span counts with the part of it that lies inside.
"""

from collections import defaultdict
from dataclasses import dataclass

from llmb.perfmodel.offload.stream_timeline import Lane
from llmb.report.timeline.tracks import Timeline, Wait, clip, overlap, total


@dataclass
class Work:
    """All work of one kind in a span."""

    count: float = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def times(self, factor: float) -> "Work":
        return Work(self.count * factor, self.seconds * factor, self.flops * factor, self.bytes * factor)

    def plus(self, other: "Work") -> "Work":
        return Work(
            self.count + other.count, self.seconds + other.seconds, self.flops + other.flops, self.bytes + other.bytes
        )

    @property
    def rate(self) -> tuple[float, str] | None:
        """What it got done a second; null where it neither computes nor copies anything that is counted."""
        if self.seconds <= 0 or not (self.flops or self.bytes):
            return None
        return (
            (self.flops / self.seconds / 1e12, "TFLOP/s") if self.flops else (self.bytes / self.seconds / 1e9, "GB/s")
        )


@dataclass(frozen=True)
class Account:
    """The figures of one span of time."""

    seconds: float
    busy: dict[Lane, float]  # seconds
    hidden: float  # seconds of copying while compute was busy, both directions added
    works: dict[tuple[Lane, str], Work]
    waits: tuple[Wait, ...]  # the part of each that lies inside

    @property
    def copying(self) -> float:
        return self.busy["inbound"] + self.busy["outbound"]

    @property
    def waiting(self) -> float:
        return sum(wait.end - wait.start for wait in self.waits)

    @property
    def tflops(self) -> float | None:
        """Over the whole span, waits included; null where no work counts its operations."""
        flops = sum(work.flops for work in self.works.values())
        return flops / self.seconds / 1e12 if flops else None

    def seconds_of(self, lane: Lane, name: str) -> float:
        return self.works[lane, name].seconds if (lane, name) in self.works else 0.0


def account(timeline: Timeline, start: float, end: float) -> Account:
    """What happened between two moments."""
    works: dict[tuple[Lane, str], Work] = defaultdict(Work)
    for stretch in timeline.lanes.stretches:
        inside = min(stretch.end, end) - max(stretch.start, start)
        if inside <= 0:
            continue
        share = inside / (stretch.end - stretch.start)
        work = works[stretch.lane, stretch.name]
        work.count += 1
        work.seconds += inside
        work.flops += share * stretch.flops
        work.bytes += share * stretch.bytes
    busy = {lane: clip(pairs, start, end) for lane, pairs in timeline.busy.items()}
    cut = (Wait(max(w.start, start), min(w.end, end), w.copy) for w in timeline.waits)
    return Account(
        seconds=end - start,
        busy={lane: total(pairs) for lane, pairs in busy.items()},
        hidden=overlap(busy["inbound"], busy["compute"]) + overlap(busy["outbound"], busy["compute"]),
        works=dict(works),
        waits=tuple(w for w in cut if w.end > w.start),
    )
