"""This rank's events file, beside config.json. Once the end is written nothing follows it.

Needs no torch, so a signal that arrives while torch is still being imported is recorded too.
"""

import threading
import time
from pathlib import Path

from llmb.events import RunEnded, RunStarted, StepDone, TimeSpent, Whereabouts, append
from llmb.spec import Status


class Record:
    """Appends to events.rank<N>.jsonl; the signal thread and the training thread take turns."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"events.rank{rank}.jsonl"
        self.rank = rank
        self.last_step = 0
        self._turn = threading.Lock()

    def add(self, event: RunStarted | StepDone | TimeSpent | Whereabouts) -> None:
        """One fact of the run."""
        with self._turn:
            append(self.path, event)
            if isinstance(event, StepDone):
                self.last_step = event.step

    def end(self, status: Status, reason: str | None = None, guilty_rank: int | None = None) -> None:
        """The last event: the turn is never given back, so a second end or a late step waits until the exit."""
        self._turn.acquire()
        end = RunEnded(time=time.time(), rank=self.rank, status=status, reason=reason, guilty_rank=guilty_rank)
        append(self.path, end)
