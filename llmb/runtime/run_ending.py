"""Every way a run can end by itself: its status, its reason and the exit code.

    ok          all steps done                                              0
    failed      the request is wrong (one line on stderr)                   1
    oom         memory ran out; the reason gives the peak and some advice   2
    diverged    loss or gradient norm is no number; the reason names the    2
                first tensor that is not finite
    failed      a checkpoint or a trace cannot be written (one line)        2
    failed      anything else (traceback on stderr)                         2

A failure is this rank's own fault as far as it can see; the desk side looks at all ranks. A wrong request is no rank's,
and who diverged is found by all ranks together. Signals are in `signals.py`. A process killed outright writes no end;
its steps are in the file.
"""

import sys
import traceback
from dataclasses import dataclass

from llmb.config.spec import Status
from llmb.errors import ConfigError, LlmbError


class Diverged(Exception):
    """The loss or the gradient norm is no longer a number; more steps would measure nothing."""

    def __init__(self, text: str, guilty_rank: int | None = None):
        super().__init__(text)
        self.guilty_rank = guilty_rank


class OutOfMemory(Exception):
    """Memory ran out; the text says how far it went and what to change."""


@dataclass(frozen=True)
class Ending:
    """What the last event says, and what the process returns."""

    status: Status
    reason: str | None
    exit_code: int
    guilty_rank: int | None = None


def ending(error: Exception | None, rank: int = 0) -> Ending:
    """How a run ends in which this rank raised this, or nothing."""
    match error:
        case None:
            return Ending("ok", None, 0)
        case ConfigError():
            return Ending("failed", str(error), error.exit_code)
        case LlmbError():
            return Ending("failed", str(error), error.exit_code, rank)
        case OutOfMemory():
            return Ending("oom", str(error), 2, rank)
        case Diverged():
            return Ending("diverged", str(error), 2, error.guilty_rank)
        case _:
            return Ending("failed", traceback.format_exception_only(error)[-1].strip(), 2, rank)


def explain(engine: str, error: Exception) -> None:
    """On stderr: one line for an end that has a name, the traceback for one that has none."""
    if isinstance(error, (LlmbError, OutOfMemory, Diverged)):
        print(f"{engine}: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
