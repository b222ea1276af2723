"""What a foreign log says about how its run ended, gathered line by line and given as one named status.

The first of these that holds: diverged (a loss or gradient norm is not a number), ok (the last step was reached,
whatever was printed while shutting down), oom, timeout, failed, incomplete. Errors that did not stop the run are kept
as log problems, as are steps that were seen twice.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from llmb.config.spec import Status
from llmb.events import Event, LogProblem, RunEnded, StepDone
from llmb.results.readers.log_lines import Line

REASON_CHARACTERS = 300

_TRACEBACK = "Traceback (most recent call last)"
_TROUBLE = re.compile(
    r"(?P<oom>CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|oom_kill event)"
    r"|(?P<timeout>DUE TO TIME LIMIT)"
    r"|(?P<failed>Traceback \(most recent call last\)|ChildFailedError|NCCL error|DistBackendError"
    r"|nccl(?:System|Internal|Remote|UnhandledCuda)Error|CUDA error: |Segmentation fault|srun: error: )"
)
# One of these is in every line that the pattern above can match, and looking for them costs a tenth of it.
_WORDS = ("rror", "Traceback", "out of memory", "oom_kill", "TIME LIMIT", "Segmentation")


class Trouble(NamedTuple):
    """A line that tells of a failure."""

    status: Status
    text: str


class Ending:
    """Hears every line and every step of one log, and judges at the end."""

    def __init__(self, nothing: str = "no timing lines"):
        self.nothing = nothing  # the reason given when there was no step
        self.asked: int | None = None
        self.last = 0
        self.diverged: str | None = None
        self.repeated = 0
        self.unreadable = 0
        self._troubles: dict[str, str] = {}  # status -> the first line that says so
        self._steps: set[tuple[int, int]] = set()
        self._traceback_of: int | None = None  # the rank whose traceback still lacks its last line

    def hear(self, line: Line) -> None:
        """Look for failures in a line."""
        if self._traceback_of == line.rank and not line.text[0].isspace() and _TRACEBACK not in line.text:
            self._traceback_of = None
            self._troubles["failed"] = line.text  # the exception itself says more than the word traceback
        if not any(map(line.text.__contains__, _WORDS)):
            return
        found = _TROUBLE.search(line.text)
        if found is None or found.lastgroup is None or found.lastgroup in self._troubles:
            return
        self._troubles[found.lastgroup] = line.text
        if found[0] == _TRACEBACK:
            self._traceback_of = line.rank

    def accept(self, step: StepDone) -> bool:
        """Whether a step is new. Of several for one rank the first counts."""
        if (step.rank, step.step) in self._steps:
            self.repeated += 1
            return False
        self._steps.add((step.rank, step.step))
        self.last = max(self.last, step.step)
        self.asked = step.steps or self.asked
        for name, value in (("loss", step.loss), ("grad_norm", step.grad_norm)):
            if self.diverged is None and value is not None and not math.isfinite(value):
                self.diverged = f"{name}={value} at step {step.step}"
        return True

    def events(self, finished: bool | None = None, unfinished: str | None = None) -> Iterator[Event]:
        """The problems met, then the end. A reader that knows better than the step count says whether and why."""
        if finished is None:
            finished = self.asked is not None and self.last >= self.asked
        for problem, count in (("step seen again", self.repeated), ("unreadable step line", self.unreadable)):
            if count:
                yield LogProblem(problem=problem, count=count)
        trouble = self._worst()
        if trouble is not None and finished:
            yield LogProblem(problem=f"error text in a run that finished: {trouble.text}")
        if self.diverged is not None:
            yield RunEnded(status="diverged", reason=self.diverged)
        elif finished:
            yield RunEnded(status="ok")
        elif trouble is not None:
            yield RunEnded(status=trouble.status, reason=trouble.text)
        else:
            yield RunEnded(status="incomplete", reason=unfinished or self._stopped())

    def _worst(self) -> Trouble | None:
        kinds: tuple[Status, ...] = ("oom", "timeout", "failed")
        for status in kinds:
            if status in self._troubles:
                return Trouble(status, self._troubles[status].strip()[:REASON_CHARACTERS])
        return None

    def _stopped(self) -> str:
        if not self.last:
            return self.nothing
        if self.asked is None:
            return f"the log stops after step {self.last} and does not say how many there were to be"
        return f"the log stops after step {self.last} of {self.asked}"
