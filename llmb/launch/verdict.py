"""How a run ended, in one word and one line, from what its processes left behind. Pure: facts in, verdict out.

The engine's own last word counts most. Several ranks: the first that failed is the cause, the others fell with it. No
last word: the exit code and the end of the log must do. A run that llmb-run stopped ended for that reason, whatever the
engine made of the SIGTERM, unless it had failed by itself before or came to its good end all the same.
"""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from llmb.events import RunEnded
from llmb.spec import Status

FAILURES = ("failed", "oom", "diverged")

_OUT_OF_MEMORY = re.compile(r"^.*(?:out of memory|OutOfMemoryError).*$", re.IGNORECASE | re.MULTILINE)
_TORCHRUN = re.compile(r"^[WE]\d{4} .*torch/distributed/elastic/multiprocessing/api\.py", re.MULTILINE)
_RANK_FAILED = re.compile(r"torch/distributed/elastic/.* failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_LONGEST_REASON = 500  # characters


class Verdict(NamedTuple):
    """A status and why."""

    status: Status
    reason: str | None


def stopped(stop: Verdict, before: RunEnded | None, exit_code: int | None, last: RunEnded | None) -> Verdict:
    """A run that llmb-run stopped. `before`, `last`: how rank 0 said it ended, by then and in the end."""
    if before is not None and before.status in FAILURES:
        return Verdict(before.status, before.reason)
    if last is not None and last.status == "ok" and exit_code == 0:
        return Verdict("ok", last.reason)
    return stop


def finished(exit_code: int | None, ends: Sequence[RunEnded], log: str) -> Verdict:
    """A run that ended by itself. `ends`: the last word of each rank; `log`: the end of the log, scrubbed."""
    own = next((end for end in ends if end.rank == 0), None)
    causes = sorted((end for end in ends if end.status in FAILURES), key=lambda end: end.time or float("inf"))
    if causes:
        cause = own if own in causes and own.reason == causes[0].reason else causes[0]
        return Verdict(cause.status, cause.reason if cause.rank == 0 else f"rank {cause.rank}: {cause.reason}")
    if own is None or (
        own.status == "incomplete" and _RANK_FAILED.search(log)
    ):  # rank 0 fell with one that said nothing
        return _speechless(exit_code, log)
    if own.status == "ok" and exit_code != 0:
        return Verdict("failed", f"{_spelled(exit_code)} after the engine had reported ok")
    return Verdict(own.status, own.reason)


def _speechless(exit_code: int | None, log: str) -> Verdict:
    """No rank said how it ended."""
    rank = ""
    words = log
    if found := _RANK_FAILED.search(log):  # torchrun prints pages of its own after what the rank had to say
        exit_code, rank = int(found[1]), f"rank {found[2]}: "
        words = log[: _TORCHRUN.search(log).start()]  # type: ignore[union-attr]
    if memory := _OUT_OF_MEMORY.findall(words):
        return Verdict("oom", _cut(rank + memory[-1].strip()))
    if exit_code == 0:
        return Verdict("failed", "exit code 0, but the engine did not say how it ended")
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines and exit_code is not None and exit_code > 0 else ""
    return Verdict("failed", _cut(f"{rank}{_spelled(exit_code)}{last}"))


def _spelled(exit_code: int | None) -> str:
    if exit_code is None:
        return "the process that watched the engine was killed"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:  # real-time signals have no name
        return f"killed by signal {-exit_code}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
