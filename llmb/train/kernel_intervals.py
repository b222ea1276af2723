"""Attribution of time to kernels or calls that overlap: arithmetic on intervals, in any unit of time.

Both `resolve` functions turn overlapping intervals into disjoint ones, so that the times of all kinds add up.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class KernelInterval(NamedTuple):
    """A kernel or call from `start` to `end`; if `decided`, calls nested in it count as its kind too."""

    start: float
    end: float
    kind: str
    name: str
    decided: bool = True


def resolve_overlaps(intervals: Iterable[KernelInterval], order: Sequence[str]) -> Iterator[KernelInterval]:
    """Yield disjoint intervals of concurrent kernels: where several overlap, the first kind of `order` counts."""
    priority = {kind: index for index, kind in enumerate(order)}
    boundaries = sorted(
        (
            (time, begins, item)
            for item in intervals
            if item.end > item.start
            for time, begins in ((item.start, True), (item.end, False))
        ),
        key=lambda boundary: boundary[:2],
    )
    running: dict[KernelInterval, None] = {}
    for (time, begins, item), (until, _, _) in pairwise(boundaries):
        if begins:
            running[item] = None
        else:
            running.pop(item, None)
        if running and until > time:
            owner = min(running, key=lambda item: priority[item.kind])
            yield owner._replace(start=time, end=until)


def resolve_nesting(intervals: Iterable[KernelInterval]) -> Iterator[KernelInterval]:
    """Yield disjoint intervals of nested calls: the innermost counts, with the kind of the outermost decided one."""
    running: list[KernelInterval] = []
    clock = 0.0

    def advance(until: float) -> Iterator[KernelInterval]:
        nonlocal clock
        if running and until > clock:
            yield running[-1]._replace(start=clock, end=until)
        clock = max(clock, until)

    for item in sorted(intervals, key=lambda item: (item.start, -item.end)):
        while running and running[-1].end <= item.start:
            yield from advance(running[-1].end)
            running.pop()
        yield from advance(item.start)
        if running and running[-1].decided:
            item = item._replace(kind=running[-1].kind, decided=True)
        running.append(item)
    while running:
        yield from advance(running[-1].end)
        running.pop()


def clip(intervals: Iterable[KernelInterval], windows: Sequence[tuple[float, float]]) -> Iterator[KernelInterval]:
    """Yield the intersections of intervals with disjoint windows."""
    for interval in intervals:
        for start, end in windows:
            if interval.start < end and start < interval.end:
                yield interval._replace(start=max(start, interval.start), end=min(end, interval.end))
