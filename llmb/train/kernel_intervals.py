"""Who owns each moment of a stretch of time that many pieces of work share: arithmetic on intervals, in any one unit.

Both functions turn overlapping work into pieces that do not overlap, so that the times of all kinds add up.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Work(NamedTuple):
    """Something that ran from `start` to `end`; `decided`: what runs inside it counts as its kind too."""

    start: float
    end: float
    kind: str
    name: str
    decided: bool = True


def by_precedence(work: Iterable[Work], order: Sequence[str]) -> Iterator[Work]:
    """Pieces of work that ran side by side: where several did, the kind that comes first in `order` owns the moment."""
    rank = {kind: place for place, kind in enumerate(order)}
    turns = sorted(
        (
            (time, begins, item)
            for item in work
            if item.end > item.start
            for time, begins in ((item.start, True), (item.end, False))
        ),
        key=lambda turn: turn[:2],
    )
    running: dict[Work, None] = {}
    for (time, begins, item), (until, _, _) in pairwise(turns):
        if begins:
            running[item] = None
        else:
            running.pop(item, None)
        if running and until > time:
            owner = min(running, key=lambda item: rank[item.kind])
            yield owner._replace(start=time, end=until)


def by_nesting(work: Iterable[Work]) -> Iterator[Work]:
    """Pieces of work that encloses other work, as calls do: the innermost owns the moment, its kind being the outermost
    that is decided."""
    running: list[Work] = []
    clock = 0.0

    def advance(until: float) -> Iterator[Work]:
        nonlocal clock
        if running and until > clock:
            yield running[-1]._replace(start=clock, end=until)
        clock = max(clock, until)

    for item in sorted(work, key=lambda item: (item.start, -item.end)):
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


def within(pieces: Iterable[Work], spans: Sequence[tuple[float, float]]) -> Iterator[Work]:
    """The parts of pieces that lie inside spans, which do not overlap."""
    for piece in pieces:
        for start, end in spans:
            if piece.start < end and start < piece.end:
                yield piece._replace(start=max(start, piece.start), end=min(end, piece.end))
