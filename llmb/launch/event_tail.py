"""Reads event files while they are being written, and adds the last word where an engine could not.

tail = EventTail(rundir.events(0))
for event in tail.new(): ...        # as often as wished; a half-written line waits for its other half
for rank, event in EventTails(rundir).new(): ...        # the same for every rank there is by now
"""

import os
from collections.abc import Iterator
from pathlib import Path

from llmb import events
from llmb.events import Event, RunEnded
from llmb.launch.run_folder import RunDir


class EventTail:
    """The events of a file, each given out once, in order."""

    def __init__(self, path: Path):
        self.path = path
        self.ended: RunEnded | None = None  # the last one seen
        self._offset = 0
        self._half = b""

    def new(self, *, finished: bool = False) -> list[Event]:
        """What was written since the last call. `finished`: nobody writes any more, half a line is all there is."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(fresh)
        *lines, self._half = (self._half + fresh).split(b"\n")
        if finished:
            lines.append(self._half)
            self._half = b""
        found = [event for event in map(events.parse, lines) if event is not None]
        for event in found:
            if isinstance(event, RunEnded):
                self.ended = event
        return found


class EventTails:
    """The events of all ranks of a run."""

    def __init__(self, rundir: RunDir):
        self._rundir = rundir
        self._by_rank: dict[int, EventTail] = {}

    def new(self, *, finished: bool = False) -> Iterator[tuple[int, Event]]:
        """What was written since the last call, with its rank."""
        for path in self._rundir.all_events():
            rank = int(path.suffixes[0].removeprefix(".rank"))
            tail = self._by_rank.setdefault(rank, EventTail(path))
            yield from ((rank, event) for event in tail.new(finished=finished))

    @property
    def ends(self) -> list[RunEnded]:
        """How each rank says it ended, those that say so."""
        return [tail.ended for tail in self._by_rank.values() if tail.ended is not None]

    @property
    def silent(self) -> list[int]:
        """Ranks that were there and have not said how they ended."""
        return sorted(rank for rank, tail in self._by_rank.items() if tail.ended is None)


def last_word(path: Path) -> RunEnded | None:
    """How a rank that writes no more says it ended."""
    tail = EventTail(path)
    tail.new(finished=True)
    return tail.ended


def record_end(path: Path, end: RunEnded) -> None:
    """Append a RunEnded, on a line of its own even where a killed engine left half a line."""
    if path.exists():
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read() != b"\n":
                file.write(b"\n")
    events.append(path, end)
