"""This rank's events file, beside config.json. Once the end is written nothing follows it.

Needs no torch, so a signal that arrives while torch is still being imported is recorded too.
"""

import threading
import time
from pathlib import Path

from llmb.config.spec import Status
from llmb.events import (
    RequestDone,
    RunEnded,
    RunStarted,
    ServingFacts,
    ServingSample,
    StepDone,
    TimeSpent,
    Whereabouts,
    append,
)

Fact = RunStarted | StepDone | RequestDone | ServingSample | ServingFacts | TimeSpent | Whereabouts


class Record:
    """Appends to events.rank<N>.jsonl; the signal thread and the one that works take turns."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"events.rank{rank}.jsonl"
        self.rank = rank
        self.reached = "step 0"  # how far the run is: its last step, or how many requests have ended
        self._turn = threading.Lock()

    def add(self, event: Fact) -> None:
        """One fact of the run."""
        with self._turn:
            append(self.path, event)
            if isinstance(event, StepDone):
                self.reached = f"step {event.step}"
            elif isinstance(event, ServingSample):
                what = "warm-up requests" if event.warmup else "requests"
                self.reached = f"{event.done} of {event.requests} {what}"

    def end(self, status: Status, reason: str | None = None, guilty_rank: int | None = None) -> None:
        """The last event: the turn is never given back, so a second end or a late step waits until the exit."""
        self._turn.acquire()
        self._append_end(status, reason, guilty_rank)

    def interrupt(self, status: Status, by: str) -> str:
        """An end in the middle of the work; gives the reason, which says how far the run is once nothing can follow."""
        self._turn.acquire()
        reason = f"interrupted by {by} after {self.reached}"
        self._append_end(status, reason, None)
        return reason

    def _append_end(self, status: Status, reason: str | None, guilty_rank: int | None) -> None:
        end = RunEnded(time=time.time(), rank=self.rank, status=status, reason=reason, guilty_rank=guilty_rank)
        append(self.path, end)
