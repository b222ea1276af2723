"""How a run ended, in one word and one line, and which rank's fault it was, from what its processes left behind.

Pure: facts in, verdict out. The engine's own last word counts most, but a rank that is killed has none, and whoever
talked to it fails for want of an answer, perhaps first. So, of several ranks, the cause is the first of these:

    killed by a signal that none of ours sends (SIGKILL, SIGSEGV), by its launcher's word, without a last word
    the first that failed by itself
    one that died without a last word, by its launcher's word or because others lost it
    the first that lost its connection to another

A run that llmb-run stopped ended for that reason, whatever the engine made of the SIGTERM, unless it had failed by
itself before or came to its good end all the same.
"""

import re
import signal
from collections.abc import Collection, Sequence
from typing import NamedTuple

from llmb.config.spec import Status
from llmb.events import RunEnded

FAILURES = ("failed", "oom", "diverged")
LAST_LINES = 20
INNERMOST = 12  # lines of a stack, of which the first are the innermost

_CRASHES = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}
_BY_SRUN = {-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM}
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError", re.IGNORECASE)
_LOST_ANOTHER = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Connection refused|Broken pipe|Timed out waiting"
    r"|Application timeout caused pair closure|Socket Timeout|remote process (?:has )?exited|ncclRemoteError"
)
_LABEL = re.compile(r"^\[rank(\d+)\]: ?", re.MULTILINE)
_TORCHRUN = re.compile(r"^[WE]\d{4} .*torch/distributed/elastic/multiprocessing/api\.py", re.MULTILINE)
_RANK_FAILED = re.compile(r"torch/distributed/elastic/.* failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_RANK_LISTED = re.compile(r"^ *rank +: (\d+) .*\n *exitcode +: (-?\d+)", re.MULTILINE)
_TASKS_FAILED = re.compile(
    r"^srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|([A-Z][\w ]+?))(?: \(core dumped\))?$",
    re.MULTILINE,
)
_NAMES = {signal.strsignal(number): -number for number in signal.valid_signals()} | {"Out Of Memory": -signal.SIGKILL}
_LONGEST_REASON = 500  # characters


class Verdict(NamedTuple):
    """A status, why, and whose fault."""

    status: Status
    reason: str | None
    guilty_rank: int | None = None


def stopped(stop: Verdict, before: Sequence[RunEnded], exit_code: int | None, last: RunEnded | None) -> Verdict:
    """A run that llmb-run stopped. `before`: how ranks said they had ended by then; `last`: rank 0 in the end."""
    causes = [cause for cause in _causes(before) if not _lost_another(cause)]
    if causes:
        return _said(causes[0], before)
    if last is not None and last.status == "ok" and exit_code == 0:
        return Verdict("ok", last.reason)
    return stop


def finished(
    exit_code: int | None, ends: Sequence[RunEnded], log: str, silent: Collection[int] = (), alone: bool = False
) -> Verdict:
    """A run that ended by itself.

    `ends`: the last word of each rank; `silent`: those that were there and have none; `log`: its end, scrubbed;
    `alone`: there is one rank only.
    """
    codes = exit_codes(log)
    dead = {rank: code for rank, code in codes.items() if rank not in {end.rank for end in ends}}
    crashed = [rank for rank, code in dead.items() if code in _CRASHES]
    causes = _causes(ends)
    only_victims = bool(causes) and _lost_another(causes[0])
    if crashed:
        return _speechless(crashed[0], dead[crashed[0]], log)
    if causes and not only_victims:
        return _said(causes[0], ends)
    if dead:
        rank, code = next(iter(dead.items()))
        return _speechless(rank, code, log)
    if only_victims:
        return _lost(sorted(silent), causes[0])
    own = next((end for end in ends if end.rank == 0), None)
    if own is None:
        return _speechless(None, exit_code, log)._replace(guilty_rank=0 if alone else None)
    if own.status == "ok" and exit_code != 0:
        return Verdict("failed", f"{_spelled(exit_code)} after the engine had reported ok")
    return Verdict(own.status, own.reason, own.guilty_rank)


def exit_codes(log: str) -> dict[int, int]:
    """Of the ranks that torchrun or srun saw fail, the one it noticed first in front."""
    if tasks := _tasks_failed(log):
        return tasks
    first = {int(found[2]): int(found[1]) for found in _RANK_FAILED.finditer(log)}
    return first | {int(found[1]): int(found[2]) for found in _RANK_LISTED.finditer(log)}


def _tasks_failed(log: str) -> dict[int, int]:
    """By srun's word; those that it ended itself, once one had failed, do not count."""
    codes: dict[int, int] = {}
    for found in _TASKS_FAILED.finditer(log):
        code = int(found[2]) if found[2] else _NAMES.get(found[3])
        if code is None or (codes and code in _BY_SRUN):
            continue
        for part in found[1].split(","):
            first, _, last = part.partition("-")
            codes |= {rank: code for rank in range(int(first), int(last or first) + 1) if rank not in codes}
    return codes


def lines_of(rank: int | None, log: str) -> list[str]:
    """What a rank printed, without its label; of a log without labels, all that is not torchrun's."""
    if _LABEL.search(log):
        label = f"[rank{rank}]: "
        return [line.removeprefix(label) for line in log.splitlines() if line.startswith(label)]
    torchrun = _TORCHRUN.search(log)  # it prints pages of its own after what the rank had to say
    return (log[: torchrun.start()] if torchrun else log).splitlines()


def last_lines(rank: int, log: str) -> list[str]:
    """The end of what a rank printed; where it was asked for its stack, up to the stack's innermost calls."""
    lines = lines_of(rank, log)
    stacks = [place for place, line in enumerate(lines) if line.startswith("Stack (most recent call first)")]
    return lines[: stacks[-1] + INNERMOST if stacks else None][-LAST_LINES:]


def _causes(ends: Sequence[RunEnded]) -> list[RunEnded]:
    """Those that failed, in the order in which they can be the cause."""
    failed = [end for end in ends if end.status in FAILURES]
    return sorted(failed, key=lambda end: (_lost_another(end), end.time or float("inf"), end.rank))


def _lost_another(end: RunEnded) -> bool:
    return end.status == "failed" and bool(_LOST_ANOTHER.search(end.reason or ""))


def _said(cause: RunEnded, ends: Sequence[RunEnded]) -> Verdict:
    """What the cause said itself. A mistake that several ranks made alike is no rank's; who diverged, all agreed on."""
    alone = len(ends) == 1 and cause.rank == 0
    if alone or cause.status == "diverged":
        return Verdict(cause.status, cause.reason, cause.guilty_rank)
    if sum((end.status, end.reason) == (cause.status, cause.reason) for end in ends) > 1:
        return Verdict(cause.status, cause.reason)
    return Verdict(cause.status, f"rank {cause.rank}: {cause.reason}", cause.rank)


def _lost(silent: list[int], victim: RunEnded) -> Verdict:
    """Only ranks that lost another have spoken."""
    if not silent:
        return Verdict("failed", f"rank {victim.rank}: {victim.reason}")
    return Verdict(
        "failed", _cut(f"rank {silent[0]}: gone without a word; rank {victim.rank}: {victim.reason}"), silent[0]
    )


def _speechless(rank: int | None, exit_code: int | None, log: str) -> Verdict:
    """A rank, or the only process, did not say how it ended."""
    who = "" if rank is None else f"rank {rank}: "
    lines = [line.strip() for line in lines_of(rank, log) if line.strip()]
    if memory := [line for line in lines if _OUT_OF_MEMORY.search(line)]:
        return Verdict("oom", _cut(who + memory[-1]), rank)
    if exit_code == 0:
        return Verdict("failed", "exit code 0, but the engine did not say how it ended", rank)
    last = f": {lines[-1]}" if lines and exit_code is not None and exit_code > 0 else ""
    return Verdict("failed", _cut(f"{who}{_spelled(exit_code)}{last}"), rank)


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
