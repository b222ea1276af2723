"""Starts of a run that restarts after failures: their events, grouped by launch.

Events are read start by start, and each start begins with the RunLaunched in the file of rank 0.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from llmb.events import Event, FaultInjected, RunEnded, RunLaunched, RunResumed, StepDone


@dataclass
class RunStart:
    """One start: when it was launched, the steps of rank 0, faults of all ranks, and its end."""

    launched: float
    resumed_step: int  # of the checkpoint that it continued from; 0: from the beginning
    steps: list[StepDone] = field(default_factory=list)
    faults: list[FaultInjected] = field(default_factory=list)
    ended: float | None = None
    reason: str | None = None

    @property
    def trained_from(self) -> float | None:
        """Time at which its first step began; None: it had no step."""
        return _began(self.steps[0]) if self.steps else None

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else self.resumed_step

    @property
    def fatal_fault(self) -> FaultInjected | None:
        """The injected fault that ended it; None: it was not injected, or did not end it."""
        return next((fault for fault in reversed(self.faults) if fault.kind != "slow_rank"), None)

    def shorten_first_step(self, usual_s: float) -> None:
        """Count what the first step takes more than others, to compile and choose kernels, as part of the start."""
        if self.steps and (self.steps[0].seconds or 0.0) > usual_s:
            self.steps[0] = replace(self.steps[0], seconds=usual_s)

    def began_after(self, step: int) -> float | None:
        """Return when the work after a step began; its end where no further step was done, None where none was."""
        later = next((done for done in self.steps if done.step > step), None)
        return _began(later) if later is not None else self.steps[-1].time if self.steps else None

    def gaps(self) -> Iterator[tuple[int, float]]:
        """Yield each step and the seconds between its end and the begin of the next."""
        for before, after in zip(self.steps, self.steps[1:], strict=False):
            if before.time is not None and (began := _began(after)) is not None:
                yield before.step, max(0.0, began - before.time)


def run_starts(events: Iterable[Event]) -> list[RunStart]:
    """Group events by start; none where the run does not restart."""
    starts: list[RunStart] = []
    for event in events:
        if isinstance(event, RunLaunched):
            starts.append(RunStart(event.time, event.step))
        elif starts:
            _add(starts[-1], event)
    return starts


def _add(start: RunStart, event: Event) -> None:
    if isinstance(event, StepDone) and event.rank == 0 and event.time is not None and event.seconds is not None:
        start.steps.append(event)
    elif isinstance(event, FaultInjected):
        _add_fault(start, event)
    elif isinstance(event, RunResumed) and event.rank == 0:
        start.resumed_step = event.step
    elif isinstance(event, RunEnded) and event.rank == 0 and event.time is not None:
        start.ended, start.reason = event.time, event.reason


def _add_fault(start: RunStart, event: FaultInjected) -> None:
    """Add a fault; of a lost node, which each of its ranks records, the first record."""
    index = next((index for index, fault in enumerate(start.faults) if fault.fault == event.fault), None)
    if index is None:
        start.faults.append(event)
    elif event.time < start.faults[index].time:
        start.faults[index] = event


def _began(step: StepDone) -> float | None:
    return None if step.time is None or step.seconds is None else step.time - step.seconds
