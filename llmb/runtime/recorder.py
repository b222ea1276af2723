"""Events file of this rank, beside config.json; the end of the run is its last line.

Imports no torch, so a signal that arrives while torch is still being imported is recorded too.
"""

import threading
import time
from pathlib import Path

from llmb.config.spec import Status
from llmb.events import (
    FaultInjected,
    GpuSample,
    HangReport,
    RequestDone,
    RunEnded,
    RunResumed,
    RunStarted,
    ServingFacts,
    ServingSample,
    StepDone,
    TimeSpent,
    append,
)

RecordedEvent = (
    RunStarted
    | RunResumed
    | StepDone
    | RequestDone
    | ServingSample
    | ServingFacts
    | GpuSample
    | TimeSpent
    | FaultInjected
    | HangReport
)


class EventRecorder:
    """Writer of events.rank<N>.jsonl, shared by the main thread, the signal thread and the GPU sampler."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"events.rank{rank}.jsonl"
        self.rank = rank
        self.progress = "step 0"  # the last step, or how many requests have ended
        self._lock = threading.Lock()

    def add(self, event: RecordedEvent) -> None:
        """Append one event of the run."""
        with self._lock:
            append(self.path, event)
            if isinstance(event, StepDone):
                self.progress = f"step {event.step}"
            elif isinstance(event, ServingSample):
                kind = "warm-up requests" if event.warmup else "requests"
                self.progress = f"{event.done} of {event.requests} {kind}"

    def end(self, status: Status, reason: str | None = None, failed_rank: int | None = None) -> None:
        """Append the last event; the lock is never released, so a second end or a late step blocks until the exit."""
        self._lock.acquire()
        self._append_end(status, reason, failed_rank)

    def interrupt(self, status: Status, by: str) -> str:
        """Append the end of an interrupted run and return its reason, which names the progress."""
        self._lock.acquire()
        reason = f"interrupted by {by} after {self.progress}"
        self._append_end(status, reason, None)
        return reason

    def _append_end(self, status: Status, reason: str | None, failed_rank: int | None) -> None:
        end = RunEnded(time=time.time(), rank=self.rank, status=status, reason=reason, failed_rank=failed_rank)
        append(self.path, end)
