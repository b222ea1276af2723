"""A job as Slurm describes it, read from what its programs print: squeue, sacct and the job completion file.

Three texts, one noun. squeue speaks of jobs that the controller still holds; the other two of those it has forgotten,
and are believed only where they say that a job has ended: a controller that crashed leaves jobs in the accounts which
"run" for ever.
"""

import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["pending", "running", "ended"]

ENDED = {
    "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
    "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
}  # fmt: skip
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUN_AGAIN = {"REQUEUED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "PENDING"}  # how earlier runs of one job id ended
NOTHING = {"", "(null)", "None", "N/A", "NONE", "Unknown", "None assigned"}

EVENTS = ("Submit", "Start", "End")
_SQUEUE_FIELDS = "JobID State Reason exit_code NodeList SubmitTime StartTime EndTime RestartCnt Comment"
SQUEUE = ",".join(f"{field}:|" for field in _SQUEUE_FIELDS.split())  # each as long as it is, and a separator
SACCT = "JobIDRaw,State,Reason,ExitCode,NodeList,Submit,Start,End,Comment"
_WORK_DIR = re.compile(r" WorkDir=(.*?) ReservationName=")

Times = tuple[float | None, float | None, float | None]  # submitted, started, ended


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job, now. Times are seconds since 1970."""

    job_id: str
    phase: Phase
    state: str  # Slurm's own word
    reason: str | None = None  # why it waits, or why it failed, as Slurm says it
    exit_code: int | None = None  # of the batch script; None: not ended, killed by a signal, or never started
    signal: int | None = None  # what killed the batch script; Slurm counts 125 for want of memory among them
    nodes: str | None = None  # as Slurm writes lists: n[1-4]
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    restarts: int = 0  # how often Slurm has put it back into the queue
    comment: str | None = None  # None: not known, or none given
    folder: str | None = None  # where it was to work: tells jobs apart where no comments are kept. None: not known


def phase_of(word: str) -> Phase:
    """A word that nobody has heard of belongs to a job worth asking after again."""
    if word in ENDED:
        return "ended"
    return "pending" if word in WAITING else "running"


def read_squeue(text: str) -> dict[str, JobState]:
    """Output in the format SQUEUE, by job id. A comment may hold newlines and the separator: it comes last."""
    found = {}
    for line in text.splitlines():
        fields = line.split("|", 9)
        if len(fields) == 10 and fields[0].isdigit():
            job_id, word, reason, code, nodes, submitted, started, ended, restarts, comment = fields
            times = (_seconds(submitted), _seconds(started), _seconds(ended))
            state = _state(job_id, word, reason, code, nodes, times, comment.removesuffix("|"))
            found[job_id] = replace(state, restarts=int(restarts) if restarts.isdigit() else 0)
    return found


def read_sacct(text: str) -> dict[str, JobState]:
    """Output in the format SACCT with --duplicates: a job that was requeued has a line for each run."""
    rows = []
    for line in text.splitlines():
        fields = line.split("|", 8)
        if len(fields) == 9 and fields[0].isdigit():
            job_id, word, reason, code, nodes, submitted, started, ended, comment = fields
            times = (_seconds(submitted), _seconds(started), _seconds(ended))
            rows.append(_state(job_id, word, reason, code, nodes, times, comment))
    return _last_of_each(rows)


def read_completions(lines: Iterable[str], wanted: Collection[str]) -> dict[str, JobState]:
    """Lines that jobcomp/filetxt wrote; its times are local ones."""
    rows = []
    for line in lines:
        match = re.match(r"JobId=(\d+) ", line)
        if match and match[1] in wanted:
            said = dict(word.split("=", 1) for word in line.split() if "=" in word)
            word, code, nodes = (said.get(key, "") for key in ("JobState", "ExitCode", "NodeList"))
            submitted, started, ended = (_local_time(said.get(f"{event}Time", "")) for event in EVENTS)
            state = _state(match[1], word, "", code, nodes, (submitted, started, ended), "")
            folder = _WORK_DIR.search(line)
            rows.append(replace(state, folder=folder[1] if folder else None))
    return _last_of_each(rows)


def _last_of_each(rows: Iterable[JobState]) -> dict[str, JobState]:
    """The newest run of each job, if it has ended."""
    runs: dict[str, list[JobState]] = {}
    for row in rows:
        runs.setdefault(row.job_id, []).append(row)
    found = {}
    for job_id, (*earlier, last) in runs.items():
        if last.phase == "ended":
            found[job_id] = replace(last, restarts=sum(run.state in RUN_AGAIN for run in earlier))
    return found


def _state(job_id: str, word: str, reason: str, code: str, nodes: str, times: Times, comment: str) -> JobState:
    """Slurm also prints when a job might start, by when it must end, and 0 for exit codes there are none of."""
    word = word.split()[0].rstrip("+") if word.strip() else ""  # "CANCELLED by 0"
    phase = phase_of(word)
    submitted, started, ended = times
    exit_code, signal = _ending(code) if phase == "ended" else (None, None)
    if exit_code == 0 and word != "COMPLETED":
        exit_code = None
    return JobState(
        job_id=job_id,
        phase=phase,
        state=word,
        reason=_known(reason),
        exit_code=exit_code,
        signal=signal,
        nodes=_known(nodes),
        submitted_at=submitted,
        started_at=started if phase != "pending" and _known(nodes) else None,
        ended_at=ended if phase == "ended" else None,
        comment=_known(comment),
    )


def _ending(code: str) -> tuple[int | None, int | None]:
    """Exit code and signal, from `3:0` or from the status that wait(2) gives, as squeue of older versions prints it."""
    if re.fullmatch(r"\d+:\d+", code):
        exit_code, signal = map(int, code.split(":"))
    elif code.isdigit():
        exit_code, signal = int(code) >> 8, int(code) & 0x7F
    else:
        return None, None
    return (None, signal) if signal else (exit_code, None)


def _known(text: str) -> str | None:
    return None if text.strip() in NOTHING else text.strip()


def _seconds(text: str) -> float | None:
    return float(text) if text.strip().isdigit() else None


def _local_time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
