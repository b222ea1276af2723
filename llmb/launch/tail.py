"""Reads an event file while it is being written, and adds the last word where an engine could not.

tail = EventTail(rundir.events(0))
for event in tail.new(): ...        # as often as wished; a half-written line waits for its other half
"""

import os
import time
from pathlib import Path

from llmb import events
from llmb.events import Event, RunEnded
from llmb.spec import Status


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


def record_end(path: Path, status: Status, reason: str | None) -> None:
    """Append a RunEnded, on a line of its own even where a killed engine left half a line."""
    if path.exists():
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read() != b"\n":
                file.write(b"\n")
    events.append(path, RunEnded(time=time.time(), status=status, reason=reason))
