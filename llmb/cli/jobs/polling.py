"""Refreshes the rows of jobs: local runs from their processes, Slurm jobs by one query for all of them.

    jobs = Poller(store).refresh(jobs)

An ended job gets its result from its run folder. A job that Slurm has forgotten, and whose folder records no end, is
lost: its outcome is unknown, which is not the same as failed. While Slurm does not respond, rows stay as they are.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llmb.cli.jobs.damaged_runs import DAMAGED, describe_damage
from llmb.cli.jobs.job_outcome import has_end, record_outcome
from llmb.cli.jobs.lost_submissions import recover_submission
from llmb.cli.stored_runs import load_run, write_result
from llmb.errors import LaunchError
from llmb.launch.run_folder import RunFolder, is_alive, is_run_folder
from llmb.launch.slurm.slurm_jobs import JobState, SlurmUnavailable, states
from llmb.launch.slurm.submission import Submission, read_submission
from llmb.results.job_store import Job, Store

FILE_SYNC_S = 5.0  # until writes of another node are visible on a network file system
UNKNOWN_JOB_GRACE_S = 60.0  # a job just submitted may be missing from the output of squeue and sacct


def print_to_stderr(text: str) -> None:
    """Print one line to stderr, beside the command's output."""
    print(" ".join(text.split()), file=sys.stderr, flush=True)


class Poller:
    """Refreshes jobs repeatedly; reports once when Slurm becomes unavailable and once when it is back."""

    def __init__(self, store: Store, log: Callable[[str], None] = print_to_stderr):
        self._store = store
        self._log = log
        self._down = False  # at the last query
        self._skip_slurm = False  # in this pass: another query would only time out like the first
        self._reported: set[str] = set()

    def refresh(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the same jobs as they are now, and update the store."""
        self._skip_slurm = False
        jobs = [self._refresh_without_slurm(job) for job in jobs]
        self._query_slurm([job for job in jobs if job.slurm_id and _is_unfinished(job)])
        return [self._store.now(job) if _is_unfinished(job) else job for job in jobs]

    def _refresh_without_slurm(self, job: Job) -> Job:
        """Refresh a job as far as possible without its Slurm state."""
        try:
            if job.launcher == "local":
                return refresh_local(self._store, job) if job.going else job
            return recover_submission(self._store, job) if job.status == "submitting" and not self._skip_slurm else job
        except SlurmUnavailable as down:
            self._report_down(down, [job])
        except Exception as error:  # a folder that was moved away or damaged must not hide the other runs
            if isinstance(error, LaunchError) or not is_run_folder(Path(job.run_dir)):
                self._report_once(f"{job.job_id}: {describe_damage(error)}")
            else:
                self._store.move_on(job, **self._damaged(job, error))
        return job

    def _query_slurm(self, jobs: Sequence[Job]) -> None:
        if not jobs or self._skip_slurm:
            return
        try:
            by_id = states([job.slurm_id for job in jobs if job.slurm_id])
        except SlurmUnavailable as down:
            self._report_down(down, jobs)
            return
        if self._down:
            self._log("Slurm responds again")
            self._down = False
        changes = [(job, self._new_columns(job, by_id.get(job.slurm_id or ""))) for job in jobs]
        try:
            with self._store.many():
                for job, columns in changes:
                    if columns:
                        self._store.move_on(job, **columns)
        except LaunchError as error:  # the rows as they are can still be shown
            self._report_once(str(error))

    def _new_columns(self, job: Job, state: JobState | None) -> dict[str, Any]:
        """Return the columns to update in a job's row."""
        try:
            run = RunFolder.open(Path(job.run_dir))
            submission = read_submission(run)
            id_reused = state is not None and not _is_same_job(run, submission, state)
            if id_reused:
                state = None
            active = state is not None and state.phase != "ended"
            if submission is None and active:  # it runs in the user's allocation, which may outlive it
                active = not has_end(run)
            if state is not None and active:
                return {**_slurm_columns(state, job), "status": state.phase, "reason": _pending_reason(state)}
            ended = has_end(run)
            if state is not None and not ended and (_just_ended(state) or _is_writing(run)):
                return _slurm_columns(state, job)  # treated as active until its files are visible
            if state is None and not ended:
                return _lost(job, certain=id_reused)
            return record_outcome(run, job, state)
        except LaunchError as error:  # the disk is full, for example: the next refresh tries again
            self._report_once(f"{job.job_id}: {error}")
            return {}
        except Exception as error:
            columns = _slurm_columns(state, job) if state else {}
            if is_run_folder(Path(job.run_dir)):
                return {**columns, **self._damaged(job, error)}
            return {**columns, "status": "lost", "reason": f"its run folder cannot be read: {describe_damage(error)}"}

    def _damaged(self, job: Job, error: Exception) -> dict[str, Any]:
        """Report a damaged run folder and return the columns of its row."""
        self._report_once(f"{job.job_id}: {job.run_dir} is damaged: {describe_damage(error)}")
        return {"status": DAMAGED, "reason": describe_damage(error)}

    def _report_down(self, down: SlurmUnavailable, jobs: Iterable[Job]) -> None:
        self._skip_slurm, was_down = True, self._down
        self._down = True
        if was_down:
            return
        refreshed_at = [job.refreshed_at for job in jobs if job.refreshed_at]
        age = f"{time.time() - min(refreshed_at):.0f} s ago" if refreshed_at else "at submission"
        self._log(f"ERROR: {down}; last known state, {age}, is shown")

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._log(f"ERROR: {text}")
        self._reported.add(text)


def refresh_local(store: Store, job: Job) -> Job:
    """Refresh a local job: if its process is gone from this host, derive how it ended."""
    run = RunFolder.open(Path(job.run_dir))
    if is_alive(run) is not False:
        return job
    config, _ = load_run(run)
    if config.limits.max_restarts and not run.result.exists() and _is_writing(run):
        return job  # llmb-run may be about to start it again
    if run.job_id is None:  # llmb-run was killed before it could write it
        run.write_record(config, job.job_id)
    store.finish(job.job_id, write_result(run, config))
    return store.job(job.job_id)


def _is_unfinished(job: Job) -> bool:
    return job.going or job.status == "lost"  # Slurm or a file system may be back


def _slurm_columns(state: JobState, job: Job) -> dict[str, Any]:
    """Return the columns of Slurm's state; times that Slurm no longer reports stay."""
    return {
        "slurm_state": state.state,
        "nodes": state.nodes if state.phase == "pending" else state.nodes or job.nodes,
        "submitted_at": state.submitted_at or job.submitted_at,
        "started_at": None if state.phase == "pending" else state.started_at or job.started_at,
        "ended_at": state.ended_at if state.phase == "ended" else None,
        "refreshed_at": time.time(),
    }


def _pending_reason(state: JobState) -> str | None:
    return state.reason if state.phase == "pending" else None


def _is_same_job(run: RunFolder, submission: Submission | None, state: JobState) -> bool:
    """Return whether the state is of this folder's job, not of another one that has its id by now."""
    if submission is None:
        return True
    same_folder = state.folder is None or f"/{run.path.parent.name}/" in state.folder  # the installation may have moved
    return same_folder and state.comment in (None, submission.token)


def _just_ended(state: JobState) -> bool:
    started, ended = state.started_at, state.ended_at
    return started is not None and ended is not None and 0 <= time.time() - ended < FILE_SYNC_S


def _is_writing(run: RunFolder) -> bool:
    """Return whether its ranks still write events: they may outlive the Slurm job and succeed."""
    return any(time.time() - path.stat().st_mtime < FILE_SYNC_S for path in run.all_events())


def _lost(job: Job, certain: bool) -> dict[str, Any]:
    """Return the columns of a lost job. `certain`: its id is reused, and that job must not be cancelled instead."""
    last_seen_at = max(job.refreshed_at or 0.0, job.submitted_at or 0.0, job.created_at)
    if job.status == "lost" or (not certain and time.time() - last_seen_at < UNKNOWN_JOB_GRACE_S):
        return {}
    return {"status": "lost", "reason": "Slurm no longer knows it, and its run folder does not say how it ended"}
