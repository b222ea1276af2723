"""Outcome of a run as its log tells it: collected line by line, given as one named status.

The first of these that holds: diverged (a loss or gradient norm is not a number), ok (the last step was reached,
whatever was printed while shutting down), oom, timeout, failed, incomplete. Errors that did not stop the run become
log problems, as do steps that occur twice.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llmb.config.spec import Status
from llmb.events import Event, LogProblem, RunEnded, StepDone
from llmb.results.readers.log_lines import Line, LogFile, clean

REASON_CHARACTERS = 300

_TRACEBACK = "Traceback (most recent call last)"
_FAILURE = re.compile(
    r"(?P<oom>CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|oom_kill event)"
    r"|(?P<timeout>DUE TO TIME LIMIT)"
    r"|(?P<failed>Traceback \(most recent call last\)|ChildFailedError|NCCL error|DistBackendError"
    r"|nccl(?:System|Internal|Remote|UnhandledCuda)Error|CUDA error: |Segmentation fault|srun: error: )"
)
# One of these is in every line that the pattern above can match, and looking for them costs a tenth of it.
_WORDS = ("rror", "Traceback", "out of memory", "oom_kill", "TIME LIMIT", "Segmentation")
_RAW_WORDS = tuple(word.encode() for word in _WORDS)


class FailureLine(NamedTuple):
    """A line that reports a failure."""

    status: Status
    text: str


class LogOutcome:
    """Collector of every line and step of one log, which decides the status at the end."""

    def __init__(self, no_steps_reason: str = "no timing lines"):
        self.no_steps_reason = no_steps_reason  # the reason when there is no step
        self.requested_steps: int | None = None
        self.last = 0
        self.diverged: str | None = None
        self.repeated = 0
        self.unreadable = 0
        self.every_line = False  # whether the reader needs the next line, whatever words it contains
        self._failures: dict[str, str] = {}  # status -> the first such line
        self._steps: set[tuple[int, int]] = set()
        self._traceback_rank: int | None = None  # the rank whose traceback still lacks its last line

    def scanned(self, lines: Iterable[bytes | str], words: Iterable[bytes]) -> Iterator[Line]:
        """Yield clean lines, each scanned for failures; of a file only those that contain a word of the reader."""
        if isinstance(lines, LogFile):
            lines = lines.having((*words, *_RAW_WORDS), lambda: self.every_line or self._traceback_rank is not None)
        for line in clean(lines):
            self.scan(line)
            yield line

    def scan(self, line: Line) -> None:
        """Look for failures in a line."""
        if self._traceback_rank == line.rank and not line.text[0].isspace() and _TRACEBACK not in line.text:
            self._traceback_rank = None
            self._failures["failed"] = line.text  # the exception is more telling than the word traceback
        if not any(map(line.text.__contains__, _WORDS)):
            return
        match = _FAILURE.search(line.text)
        if match is None or match.lastgroup is None or match.lastgroup in self._failures:
            return
        self._failures[match.lastgroup] = line.text
        if match[0] == _TRACEBACK:
            self._traceback_rank = line.rank

    def accept(self, step: StepDone) -> bool:
        """Return whether a step is new; of several for one rank the first counts."""
        if (step.rank, step.step) in self._steps:
            self.repeated += 1
            return False
        self._steps.add((step.rank, step.step))
        self.last = max(self.last, step.step)
        self.requested_steps = step.steps or self.requested_steps
        for name, value in (("loss", step.loss), ("grad_norm", step.grad_norm)):
            if self.diverged is None and value is not None and not math.isfinite(value):
                self.diverged = f"{name}={value} at step {step.step}"
        return True

    def events(self, finished: bool | None = None, unfinished: str | None = None) -> Iterator[Event]:
        """Yield the problems, then the end. A reader may override whether the run finished, and the reason if not."""
        if finished is None:
            finished = self.requested_steps is not None and self.last >= self.requested_steps
        for problem, count in (("step seen again", self.repeated), ("unreadable step line", self.unreadable)):
            if count:
                yield LogProblem(problem=problem, count=count)
        failure_line = self._worst_failure()
        if failure_line is not None and finished:
            yield LogProblem(problem=f"error text in a run that finished: {failure_line.text}")
        if self.diverged is not None:
            yield RunEnded(status="diverged", reason=self.diverged)
        elif finished:
            yield RunEnded(status="ok")
        elif failure_line is not None:
            yield RunEnded(status=failure_line.status, reason=failure_line.text)
        else:
            yield RunEnded(status="incomplete", reason=unfinished or self._stop_reason())

    def _worst_failure(self) -> FailureLine | None:
        kinds: tuple[Status, ...] = ("oom", "timeout", "failed")
        for status in kinds:
            if status in self._failures:
                return FailureLine(status, self._failures[status].strip()[:REASON_CHARACTERS])
        return None

    def _stop_reason(self) -> str:
        if not self.last:
            return self.no_steps_reason
        if self.requested_steps is None:
            return f"the log stops after step {self.last} without naming the number of steps"
        return f"the log stops after step {self.last} of {self.requested_steps}"
