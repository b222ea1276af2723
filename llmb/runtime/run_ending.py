"""Every way a run can end by itself: status, reason and exit code.

    ok          all steps done                                              0
    failed      the configuration is wrong (one line on stderr)             1
    oom         memory ran out; the reason gives the peak and some advice   2
    diverged    loss or gradient norm is NaN or Inf; the reason names the   2
                first non-finite tensor
    failed      a checkpoint or a trace cannot be written (one line)        2
    failed      anything else (traceback on stderr)                         2

A rank reports itself as the failed rank; the launcher compares the reports of all ranks. A wrong configuration has no
failed rank, and all ranks together determine who diverged. Signals are in `signals.py`. A process killed by SIGKILL
records no end; its steps are in the file.
"""

import sys
import traceback
from dataclasses import dataclass

from llmb.config.spec import Status
from llmb.errors import ConfigError, LaunchError, LlmbError


class Diverged(Exception):
    """The loss or the gradient norm is NaN or Inf; more steps would measure nothing."""

    def __init__(self, text: str, failed_rank: int | None = None):
        super().__init__(text)
        self.failed_rank = failed_rank


class OutOfMemory(Exception):
    """Memory ran out; the text gives the peak and what to change."""


@dataclass(frozen=True)
class RankEnding:
    """End of one rank: the content of its last event and its exit code."""

    status: Status
    reason: str | None
    exit_code: int
    failed_rank: int | None = None


def ending_of(error: Exception | None, rank: int = 0) -> RankEnding:
    """Return how a run ends in which this rank raised `error`, or nothing."""
    match error:
        case None:
            return RankEnding("ok", None, 0)
        case ConfigError():
            return RankEnding("failed", str(error), error.exit_code)
        case LaunchError(failed_rank=int(culprit)):
            return RankEnding("failed", str(error), error.exit_code, culprit)
        case LlmbError():
            return RankEnding("failed", str(error), error.exit_code, rank)
        case OutOfMemory():
            return RankEnding("oom", str(error), 2, rank)
        case Diverged():
            return RankEnding("diverged", str(error), 2, error.failed_rank)
        case _:
            return RankEnding("failed", traceback.format_exception_only(error)[-1].strip(), 2, rank)


def print_error(engine: str, error: Exception) -> None:
    """Print an expected error as one line on stderr, an unexpected one with its traceback."""
    if isinstance(error, (LlmbError, OutOfMemory, Diverged)):
        print(f"{engine}: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
