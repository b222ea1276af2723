"""State of a Slurm job, parsed from the output of squeue, of sacct, or from the job completion file.

squeue reports jobs that the controller still holds; the other two those it has purged, and count only where they say
that a job has ended: a controller that crashed leaves jobs in the accounting database which "run" for ever.
"""

import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

JobPhase = Literal["pending", "running", "ended"]

ENDED_STATES = {
    "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
    "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
}  # fmt: skip
PENDING_STATES = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
REQUEUED_STATES = {"REQUEUED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "PENDING"}  # how earlier runs of one job id ended
NULL_VALUES = {"", "(null)", "None", "N/A", "NONE", "Unknown", "None assigned"}

_TIME_FIELDS = ("Submit", "Start", "End")
_SQUEUE_FIELDS = "JobID State Reason exit_code NodeList SubmitTime StartTime EndTime RestartCnt Comment"
SQUEUE_FORMAT = ",".join(f"{field}:|" for field in _SQUEUE_FIELDS.split())  # unpadded, with a separator
SACCT_FORMAT = "JobIDRaw,State,Reason,ExitCode,NodeList,Submit,Start,End,Comment"
_WORK_DIR = re.compile(r" WorkDir=(.*?) ReservationName=")

JobTimes = tuple[float | None, float | None, float | None]  # submitted, started, ended


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Current state of one job. Times are seconds since 1970."""

    job_id: str
    phase: JobPhase
    state: str  # as Slurm names it
    reason: str | None = None  # why it is pending, or why it failed, as Slurm says it
    exit_code: int | None = None  # of the batch script; None: not ended, killed by a signal, or never started
    signal: int | None = None  # what killed the batch script; Slurm uses 125 for out of memory
    nodes: str | None = None  # compressed hostlist: n[1-4]
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    restarts: int = 0  # how often Slurm has requeued it
    comment: str | None = None  # None: unknown, or not set
    folder: str | None = None  # WorkDir: tells jobs apart where no comments are stored. None: unknown


def job_phase(state: str) -> JobPhase:
    """Return the phase of a Slurm state; a job in an unknown state counts as running, and is queried again."""
    if state in ENDED_STATES:
        return "ended"
    return "pending" if state in PENDING_STATES else "running"


def parse_squeue(text: str) -> dict[str, JobState]:
    """Parse output in SQUEUE_FORMAT, by job id. A comment may hold newlines and the separator: it comes last."""
    jobs = {}
    for line in text.splitlines():
        fields = line.split("|", 9)
        if len(fields) == 10 and fields[0].isdigit():
            job_id, state, reason, code, nodes, submitted, started, ended, restarts, comment = fields
            times = (_seconds(submitted), _seconds(started), _seconds(ended))
            job = _job_state(job_id, state, reason, code, nodes, times, comment.removesuffix("|"))
            jobs[job_id] = replace(job, restarts=int(restarts) if restarts.isdigit() else 0)
    return jobs


def parse_sacct(text: str) -> dict[str, JobState]:
    """Parse output in SACCT_FORMAT with --duplicates: a job that was requeued has a line for each run."""
    rows = []
    for line in text.splitlines():
        fields = line.split("|", 8)
        if len(fields) == 9 and fields[0].isdigit():
            job_id, state, reason, code, nodes, submitted, started, ended, comment = fields
            times = (_seconds(submitted), _seconds(started), _seconds(ended))
            rows.append(_job_state(job_id, state, reason, code, nodes, times, comment))
    return _newest_runs(rows)


def parse_completions(lines: Iterable[str], job_ids: Collection[str]) -> dict[str, JobState]:
    """Parse the lines of jobcomp/filetxt that are about these jobs; its times are local ones."""
    rows = []
    for line in lines:
        match = re.match(r"JobId=(\d+) ", line)
        if match and match[1] in job_ids:
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            state, code, nodes = (fields.get(key, "") for key in ("JobState", "ExitCode", "NodeList"))
            submitted, started, ended = (_local_time(fields.get(f"{event}Time", "")) for event in _TIME_FIELDS)
            job = _job_state(match[1], state, "", code, nodes, (submitted, started, ended), "")
            folder = _WORK_DIR.search(line)
            rows.append(replace(job, folder=folder[1] if folder else None))
    return _newest_runs(rows)


def _newest_runs(rows: Iterable[JobState]) -> dict[str, JobState]:
    """Return the newest run of each job, if it has ended."""
    runs: dict[str, list[JobState]] = {}
    for row in rows:
        runs.setdefault(row.job_id, []).append(row)
    jobs = {}
    for job_id, (*earlier, last) in runs.items():
        if last.phase == "ended":
            jobs[job_id] = replace(last, restarts=sum(run.state in REQUEUED_STATES for run in earlier))
    return jobs


def _job_state(job_id: str, state: str, reason: str, code: str, nodes: str, times: JobTimes, comment: str) -> JobState:
    """Build a JobState; Slurm also prints expected start and end times, and 0 where there is no exit code."""
    state = state.split()[0].rstrip("+") if state.strip() else ""  # "CANCELLED by 0"
    phase = job_phase(state)
    submitted, started, ended = times
    exit_code, signal = _exit_status(code) if phase == "ended" else (None, None)
    if exit_code == 0 and state != "COMPLETED":
        exit_code = None
    return JobState(
        job_id=job_id,
        phase=phase,
        state=state,
        reason=_text_or_none(reason),
        exit_code=exit_code,
        signal=signal,
        nodes=_text_or_none(nodes),
        submitted_at=submitted,
        started_at=started if phase != "pending" and _text_or_none(nodes) else None,
        ended_at=ended if phase == "ended" else None,
        comment=_text_or_none(comment),
    )


def _exit_status(code: str) -> tuple[int | None, int | None]:
    """Parse exit code and signal from `3:0`, or from the wait(2) status that older versions of squeue print."""
    if re.fullmatch(r"\d+:\d+", code):
        exit_code, signal = map(int, code.split(":"))
    elif code.isdigit():
        exit_code, signal = int(code) >> 8, int(code) & 0x7F
    else:
        return None, None
    return (None, signal) if signal else (exit_code, None)


def _text_or_none(text: str) -> str | None:
    return None if text.strip() in NULL_VALUES else text.strip()


def _seconds(text: str) -> float | None:
    return float(text) if text.strip().isdigit() else None


def _local_time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
