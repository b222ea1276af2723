"""Reads event files while they are being written, and appends the RunEnded that an engine could not write.

tail = EventTail(run_folder.events(0))
for event in tail.new(): ...        # repeatedly; a partial line waits until it is complete
for rank, event in EventTails(run_folder).new(): ...        # the same for every rank that exists by now
"""

import os
from collections.abc import Iterator
from pathlib import Path

from llmb import events
from llmb.config.serialization import open_regular_file
from llmb.errors import ConfigError
from llmb.events import Event, RunEnded
from llmb.formats.dense_reader import DenseReader
from llmb.launch.run_folder import RunFolder

READ_BYTES = 2**20


class EventTail:
    """Events of a file, each returned once, in order."""

    def __init__(self, path: Path):
        self.path = path
        self.ended: RunEnded | None = None  # the last one read
        self._offset = 0
        self._partial_line = b""

    def new(self, *, finished: bool = False) -> list[Event]:
        """Return the events since the last call. `finished`: nobody writes any more, so parse a partial line too."""
        new_events = [event for event in map(events.parse, self._new_lines(finished)) if event is not None]
        for event in new_events:
            if isinstance(event, RunEnded):
                self.ended = event
        return new_events

    def _new_lines(self, finished: bool) -> Iterator[bytes]:
        try:
            with DenseReader(open_regular_file(self.path, buffering=0)) as file:
                file.seek(self._offset)
                while block := file.read(READ_BYTES):
                    self._offset = file.tell()
                    *lines, self._partial_line = (self._partial_line + block).split(b"\n")
                    if len(self._partial_line) > events.MAX_LINE_BYTES or self._partial_line.startswith(b"\0"):
                        self._partial_line = b"\0"  # nothing that follows makes it an event
                    yield from lines
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from error
        if finished:
            yield self._partial_line
            self._partial_line = b""


class EventTails:
    """Events of all ranks of a run."""

    def __init__(self, run_folder: RunFolder):
        self._run_folder = run_folder
        self._by_rank: dict[int, EventTail] = {}

    def new(self, *, finished: bool = False) -> Iterator[tuple[int, Event]]:
        """Yield (rank, event) for the events since the last call."""
        for path in self._run_folder.all_events():
            rank = int(path.suffixes[0].removeprefix(".rank"))
            tail = self._by_rank.setdefault(rank, EventTail(path))
            yield from ((rank, event) for event in tail.new(finished=finished))

    @property
    def ends(self) -> list[RunEnded]:
        """RunEnded of each rank that has written one."""
        return [tail.ended for tail in self._by_rank.values() if tail.ended is not None]

    @property
    def rank0_end(self) -> RunEnded | None:
        """RunEnded that rank 0 has written."""
        return next((end for end in self.ends if end.rank == 0), None)

    @property
    def silent(self) -> list[int]:
        """Ranks that have started and not written a RunEnded."""
        return sorted(rank for rank, tail in self._by_rank.items() if tail.ended is None)


def read_run_end(path: Path) -> RunEnded | None:
    """Return the last RunEnded in the event file of a rank that has exited."""
    tail = EventTail(path)
    tail.new(finished=True)
    return tail.ended


def append_run_end(path: Path, end: RunEnded) -> None:
    """Append a RunEnded, on a line of its own even where a killed engine left a partial line."""
    if path.exists():
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read() != b"\n":
                file.write(b"\n")
    events.append(path, end)
