"""Outcome of a Slurm job: the result in its run folder, combined with Slurm's state of the job.

The run itself writes result.json inside its job. A node failure loses that, and Slurm may know better why a run ended
(a time limit, a preemption): then the failure is diagnosed from all evidence, and result.json is updated. ending.json
stores Slurm's part beside it: Slurm forgets, and a rebuilt job store must not.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

from llmb.cli.stored_runs import load_events, load_run, unwritten, write_result
from llmb.config.serialization import build, read_json, to_json, write_atomic
from llmb.config.spec import RunConfig, Status
from llmb.errors import LaunchError
from llmb.events import RunEnded
from llmb.launch.event_tail import append_run_end, read_run_end
from llmb.launch.failure import Failure, diagnose_run
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.slurm_jobs import JobState
from llmb.results.derive import derive
from llmb.results.job_store import Job, figures
from llmb.results.result import Result

STATUS_OF: dict[str, Status] = {
    "time_limit": "timeout",
    "oom_kill": "oom",
    "gpu_oom": "oom",
    "cancelled": "incomplete",
    "preemption": "incomplete",
}


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """Facts about the end of a job besides its Result. Null: not reported by Slurm, or already forgotten."""

    slurm_state: str | None = None
    nodes: str | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    failure: str | None = None  # its kind; null: none
    retryable: bool = False
    excluded_nodes: tuple[str, ...] = ()

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of the job's row; a failure that is not retryable has no retries left."""
        times = {"submitted_at": self.submitted_at, "started_at": self.started_at, "ended_at": self.ended_at}
        columns = {"slurm_state": self.slurm_state, "nodes": self.nodes, **times}
        return columns if self.retryable else {**columns, "retries": 0}


def has_end(run: RunFolder) -> bool:
    """Return whether the folder says how the run ended."""
    return run.result.exists() or read_run_end(run.events(0)) is not None


def record_outcome(run: RunFolder, job: Job, state: JobState | None, *, must_write: bool = True) -> dict[str, Any]:
    """Store the outcome of an ended job in its folder; return the columns of its row.

    `state`: from Slurm; None: Slurm has forgotten the job, and the folder says how it ended. `must_write`: a folder
    that cannot be written is a LaunchError; else the row alone has what is known.
    """
    config, result = load_run(run)
    if run.all_events():  # ranks may have outlived their supervisor, and written more since the result was derived
        result = write_result(run, config) if must_write else derive(config, load_events(run, config))
    failure = diagnose_run(run, state)
    final = _with_failure(result, failure)
    outcome = JobOutcome(
        slurm_state=state.state if state else None,
        nodes=state.nodes if state and state.nodes else job.nodes,
        submitted_at=state.submitted_at if state and state.submitted_at else job.submitted_at,
        started_at=state.started_at if state and state.started_at else job.started_at,
        ended_at=state.ended_at if state else None,
        failure=failure.kind if failure else None,
        retryable=failure.retryable if failure else False,
        excluded_nodes=failure.excluded_nodes if failure else (),
    )
    try:
        if final != result or not run.result.exists():
            write_atomic(run.result, to_json(final) + "\n")
        _write(run, outcome)
    except LaunchError as error:
        if must_write:
            raise
        final = unwritten(final, error)
    return {**figures(final), **outcome.columns, "refreshed_at": time.time()}


def record_unsubmitted(run: RunFolder, config: RunConfig, reason: str) -> None:
    """Record in its folder that a job was never submitted."""
    append_run_end(run.events(0), RunEnded(time=time.time(), status="failed", reason=reason))
    write_result(run, config)
    _write(run, JobOutcome(failure="refused"))


def read_job_outcome(run: RunFolder) -> JobOutcome | None:
    """Return the stored outcome; None: the job had not ended at the last refresh."""
    return build(JobOutcome, read_json(run.job_outcome), "ending.json") if run.job_outcome.exists() else None


def _write(run: RunFolder, outcome: JobOutcome) -> None:
    write_atomic(run.job_outcome, to_json(outcome) + "\n")


def _with_failure(result: Result, failure: Failure | None) -> Result:
    """Return the result with the failure named; a run that ended without reporting why has failed."""
    if failure is None:
        return result
    unreported = result.status in ("ok", "incomplete", "timeout")  # a time limit has its own kind of failure
    status = STATUS_OF.get(failure.kind) or ("failed" if unreported else result.status)
    return replace(result, status=status, reason=failure.reason)
