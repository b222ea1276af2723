"""Verdict on a run: status, one line of reason, and the failed rank, from what its processes left behind.

Pure. The RunEnded of a rank counts most, but a rank that is killed writes none, and its peers then fail too, perhaps
first. So, of several ranks, the cause is the first of these:

    killed by a signal that llmb never sends (SIGKILL, SIGSEGV), according to its launcher, without a RunEnded
    the first that failed by itself
    one that died without a RunEnded, according to its launcher or because peers lost the connection to it
    the first that lost the connection to a peer

A rank killed by SIGKILL while the kernel's OOM killer was at work ended `oom`: nobody here sends SIGKILL to a run that
was not stopped.

A run that llmb-run stopped ended for that reason, whatever the engine made of the SIGTERM, unless it had failed by
itself before or completed all the same.
"""

import re
import signal
from collections.abc import Collection, Sequence
from typing import NamedTuple

from llmb.config.spec import Status
from llmb.events import RunEnded

FAILED_STATUSES = ("failed", "oom", "diverged")
LAST_LINES = 20
SUPERVISOR_KILLED = "the supervisor of the engine was killed"
STACK_LINES = 12  # of a stack trace, innermost frames first

_CRASH_CODES = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}
_SRUN_KILL_CODES = {-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM}
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError", re.IGNORECASE)
_CONNECTION_LOST = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Connection refused|Broken pipe|Timed out waiting"
    r"|Application timeout caused pair closure|Socket Timeout|remote process (?:has )?exited|ncclRemoteError"
)
_RANK_PREFIX = re.compile(r"^\[rank(\d+)\]: ?", re.MULTILINE)
_TORCHRUN = re.compile(r"^[WE]\d{4} .*torch/distributed/elastic/multiprocessing/api\.py", re.MULTILINE)
_RANK_FAILED = re.compile(r"torch/distributed/elastic/.* failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_RANK_LISTED = re.compile(r"^ *rank +: (\d+) .*\n *exitcode +: (-?\d+)", re.MULTILINE)
_TASKS_FAILED = re.compile(
    r"^srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|([A-Z][\w ]+?))(?: \(core dumped\))?$",
    re.MULTILINE,
)
_TASKS_OUT_OF_MEMORY = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: Out Of Memory$", re.MULTILINE)
_SIGNAL_CODES = {signal.strsignal(number): -number for number in signal.valid_signals()}
_SIGNAL_CODES["Out Of Memory"] = -signal.SIGKILL
_MAX_REASON_CHARS = 500


class Verdict(NamedTuple):
    """Status, reason and failed rank of a run."""

    status: Status
    reason: str | None
    failed_rank: int | None = None


def stopped_run_verdict(
    stop: Verdict, before: Sequence[RunEnded], exit_code: int | None, last: RunEnded | None
) -> Verdict:
    """Judge a run that llmb-run stopped. `before`: RunEnded events until then; `last`: the one of rank 0."""
    causes = [cause for cause in _causes(before) if not _lost_peer(cause)]
    if causes:
        return _reported(causes[0], before)
    if last is not None and last.status == "ok" and exit_code == 0:
        return Verdict("ok", last.reason)
    return stop


def finished_run_verdict(
    exit_code: int | None,
    ends: Sequence[RunEnded],
    log: str,
    silent: Collection[int] = (),
    single_rank: bool = False,
    oom_kills: int = 0,
    memory: str | None = None,
    launcher: str | None = None,
) -> Verdict:
    """Judge a run that ended by itself.

    `ends`: RunEnded of each rank; `silent`: ranks that had started and wrote none; `log`: its tail, scrubbed;
    `single_rank`: there is one rank only; `oom_kills`: processes that the kernel killed for memory meanwhile, on this
    host; `memory`: how much was used, where known; `launcher`: of ranks on other hosts, with its own: "srun on n1".
    """
    if launcher is not None and exit_code == -signal.SIGKILL:  # what its ranks report is how they lost it
        if oom_kills:
            return _killed_for_memory(f"{launcher} ", oom_kills, memory)
        return Verdict("failed", f"{launcher} was {_describe_exit(exit_code)}; its ranks ended with it")
    causes = _causes(ends)
    all_lost_peer = bool(causes) and _lost_peer(causes[0])
    codes = exit_codes(log)
    if all_lost_peer:  # a SIGKILL is what they report; the node of that rank was the last to tell srun
        codes |= _tasks_failed(log, _SRUN_KILL_CODES - {-signal.SIGKILL})
    dead = {rank: code for rank, code in codes.items() if rank not in {end.rank for end in ends}}
    crashed = [rank for rank, code in dead.items() if code in _CRASH_CODES]
    if oom_kills and launcher is None and -signal.SIGKILL in (exit_code, *dead.values()):
        killed = next((rank for rank, code in dead.items() if code == -signal.SIGKILL), 0 if single_rank else None)
        subject = "" if killed is None else f"rank {killed}: "
        return _killed_for_memory(subject, oom_kills, memory)._replace(failed_rank=killed)
    if crashed and (by_slurm := _TASKS_OUT_OF_MEMORY.search(log)):
        return Verdict("oom", f"rank {crashed[0]}: {by_slurm[0]}", crashed[0])
    if crashed:
        return _unreported(crashed[0], dead[crashed[0]], log)
    if causes and not all_lost_peer:
        return _reported(causes[0], ends)
    if dead:
        rank, code = next(iter(dead.items()))
        return _unreported(rank, code, log)
    if all_lost_peer:
        return _lost_rank(sorted(silent), causes[0])
    rank0_end = next((end for end in ends if end.rank == 0), None)
    if exit_code is None and rank0_end is not None and rank0_end.status == "incomplete":
        return Verdict("failed", f"{SUPERVISOR_KILLED}; its ranks: {rank0_end.reason}")  # nobody cancelled the run
    if rank0_end is None:
        return _unreported(None, exit_code, log)._replace(failed_rank=0 if single_rank else None)
    if rank0_end.status == "ok" and exit_code != 0:
        return Verdict("failed", f"{_describe_exit(exit_code)} after the engine had reported ok")
    return Verdict(rank0_end.status, rank0_end.reason, rank0_end.failed_rank)


def exit_codes(log: str) -> dict[int, int]:
    """Return the exit codes of the ranks that torchrun or srun saw fail, in the order noticed."""
    if tasks := _tasks_failed(log, _SRUN_KILL_CODES):
        return tasks
    first = {int(match[2]): int(match[1]) for match in _RANK_FAILED.finditer(log)}
    return first | {int(match[1]): int(match[2]) for match in _RANK_LISTED.finditer(log)}


def _tasks_failed(log: str, srun_kill_codes: Collection[int]) -> dict[int, int]:
    """Parse the lines of srun; tasks that it killed itself (by these codes), once one had failed, do not count."""
    codes: dict[int, int] = {}
    for match in _TASKS_FAILED.finditer(log):
        code = int(match[2]) if match[2] else _SIGNAL_CODES.get(match[3])
        if code is None or (codes and code in srun_kill_codes):
            continue
        for item in match[1].split(","):
            first, _, last = item.partition("-")
            codes |= {rank: code for rank in range(int(first), int(last or first) + 1) if rank not in codes}
    return codes


def lines_of(rank: int | None, log: str) -> list[str]:
    """Return the lines of a rank, without their prefix; of a log without prefixes, all that are not torchrun's."""
    if _RANK_PREFIX.search(log):
        prefix = f"[rank{rank}]: "
        return [line.removeprefix(prefix) for line in log.splitlines() if line.startswith(prefix)]
    torchrun = _TORCHRUN.search(log)  # it prints pages of its own after the rank's output
    return (log[: torchrun.start()] if torchrun else log).splitlines()


def last_lines(rank: int, log: str) -> list[str]:
    """Return the last lines of a rank; where it dumped its stack, up to the innermost frames."""
    lines = lines_of(rank, log)
    stacks = [index for index, line in enumerate(lines) if line.startswith("Stack (most recent call first)")]
    return lines[: stacks[-1] + STACK_LINES if stacks else None][-LAST_LINES:]


def _causes(ends: Sequence[RunEnded]) -> list[RunEnded]:
    """Return the failures, the likeliest cause first."""
    failed = [end for end in ends if end.status in FAILED_STATUSES]
    return sorted(failed, key=lambda end: (_lost_peer(end), end.time or float("inf"), end.rank))


def _lost_peer(end: RunEnded) -> bool:
    return end.status == "failed" and bool(_CONNECTION_LOST.search(end.reason or ""))


def _reported(cause: RunEnded, ends: Sequence[RunEnded]) -> Verdict:
    """Return the verdict that the cause reported.

    The same error on several ranks blames none, unless all name the one that failed; divergence is global, and a
    refusal would be the same on every rank.
    """
    only_rank = len(ends) == 1 and cause.rank == 0
    is_refusal = cause.status == "failed" and cause.failed_rank is None
    if only_rank or cause.status == "diverged" or is_refusal:
        return Verdict(cause.status, cause.reason, cause.failed_rank)
    alike = [end for end in ends if (end.status, end.reason) == (cause.status, cause.reason)]
    failed = {end.rank if end.failed_rank is None else end.failed_rank for end in alike}
    if len(failed) > 1:
        return Verdict(cause.status, cause.reason)
    (rank,) = failed
    return Verdict(cause.status, f"rank {rank}: {cause.reason}", rank)


def _lost_rank(silent: list[int], victim: RunEnded) -> Verdict:
    """Judge a run in which every reported failure is a lost connection."""
    if not silent:
        return Verdict("failed", f"rank {victim.rank}: {victim.reason}")
    return Verdict(
        "failed",
        _truncate(f"rank {silent[0]}: disappeared without an exit status; rank {victim.rank}: {victim.reason}"),
        silent[0],
    )


def _killed_for_memory(subject: str, oom_kills: int, memory: str | None) -> Verdict:
    """Judge a run of which the kernel killed a rank, or the launcher, because host memory was exhausted."""
    processes = "1 process" if oom_kills == 1 else f"{oom_kills} processes"
    reason = f"killed by the kernel's OOM killer, which ended {processes} during the run: host memory was exhausted"
    return Verdict("oom", f"{subject}{reason}" + (f" ({memory})" if memory else ""))


def _unreported(rank: int | None, exit_code: int | None, log: str) -> Verdict:
    """Judge a rank, or the only process, that wrote no RunEnded."""
    prefix = "" if rank is None else f"rank {rank}: "
    lines = [line.strip() for line in lines_of(rank, log) if line.strip()]
    if memory_lines := [line for line in lines if _OUT_OF_MEMORY.search(line)]:
        return Verdict("oom", _truncate(prefix + memory_lines[-1]), rank)
    if exit_code == 0:
        return Verdict("failed", "exit code 0, but the engine recorded no end", rank)
    last_line = f": {lines[-1]}" if lines and exit_code is not None and exit_code > 0 else ""
    return Verdict("failed", _truncate(f"{prefix}{_describe_exit(exit_code)}{last_line}"), rank)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return SUPERVISOR_KILLED
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:  # real-time signals have no name
        return f"killed by signal {-exit_code}"


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."
