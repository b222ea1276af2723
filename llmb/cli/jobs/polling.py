"""Refreshes the rows of jobs: local runs from their processes, Slurm jobs by one query for all of them.

    jobs = Poller(store).refresh(jobs)

An ended job gets its result from its run folder. A job that Slurm has forgotten, and whose folder records no end, is
lost: its outcome is unknown, which is not the same as failed. While Slurm does not respond, rows stay as they are.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmb.cli.jobs.damaged_runs import DAMAGED, describe_damage
from llmb.cli.jobs.job_outcome import has_end, record_outcome
from llmb.cli.jobs.lost_submissions import recover_submission
from llmb.cli.stored_runs import load_run, settle_result
from llmb.errors import ConfigError, LaunchError
from llmb.launch.run_files.pid_file import is_alive
from llmb.launch.run_folder import RunFolder, is_run_folder
from llmb.launch.slurm.slurm_jobs import JobState, SlurmUnavailable, states
from llmb.launch.slurm.submission import Submission, read_submission
from llmb.results.job_store import Job, Store, figures

FILE_SYNC_S = 5.0  # until writes of another node are visible on a network file system
UNWRITABLE_GRACE_S = 60.0  # after the end of a job, while its folder may become writable again
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
        self._unsaved: dict[str, Job] = {}  # by run folder: rows that the store could not take

    def refresh(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the same jobs as they are now, and update the store."""
        self._skip_slurm = False
        jobs = [self._refresh_without_slurm(job) for job in jobs]
        self._query_slurm([job for job in jobs if job.slurm_id and _is_unfinished(job)])
        return self.with_unsaved([self._store.now(job) if _is_unfinished(job) else job for job in jobs])

    def with_unsaved(self, jobs: Sequence[Job]) -> list[Job]:
        """Return these rows as they would be if the store could be written: a full disk must not hide an end."""
        return [self._unsaved.get(job.run_dir, job) for job in jobs]

    def _refresh_without_slurm(self, job: Job) -> Job:
        """Refresh a job as far as possible without its Slurm state."""
        try:
            if job.launcher == "local":
                return self._refresh_local(job) if _is_unfinished(job) else job
            return recover_submission(self._store, job) if job.status == "submitting" and not self._skip_slurm else job
        except SlurmUnavailable as down:
            self._report_down(down, [job])
        except Exception as error:  # a folder that was moved away or damaged must not hide the other runs
            if isinstance(error, LaunchError) or not _is_readable(job):
                if job.going:
                    self._report_once(f"{job.job_id}: {describe_damage(error, job.run_dir)}")
                if job.launcher == "local" and not isinstance(error, LaunchError):
                    self._save([(job, _unreadable(job, error))])
            else:
                self._save([(job, self._damaged(job, error))])
        return job

    def _refresh_local(self, job: Job) -> Job:
        """Refresh a local job: if its process is gone from this host, derive how it ended."""
        run = RunFolder.open(Path(job.run_dir))
        if is_alive(run) is not False:
            return job
        config, _ = load_run(run)
        if config.limits.max_restarts and not run.result.exists() and _is_writing(run):
            return job  # llmb-run may be about to start it again
        result = settle_result(run, config)
        self._save([(job, figures(result))])
        if run.job_id is None:  # llmb-run was killed before it could write it
            run.write_record(config, job.job_id)
        return self._store.now(job)

    def _save(self, changes: Sequence[tuple[Job, dict[str, Any]]]) -> None:
        """Update rows in the store, or keep them in memory if it cannot be written."""
        try:
            with self._store.many():
                for job, columns in changes:
                    if columns:
                        self._store.move_on(job, **columns)
                        self._unsaved.pop(job.run_dir, None)
        except LaunchError as error:
            self._report_once(str(error))
            self._unsaved |= {job.run_dir: replace(job, **columns) for job, columns in changes if columns}

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
        self._save([(job, self._new_columns(job, by_id.get(job.slurm_id or ""))) for job in jobs])

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
            return self._outcome(run, job, state)
        except Exception as error:
            columns = _slurm_columns(state, job) if state else {}
            return {**columns, **(self._damaged(job, error) if _is_readable(job) else _unreadable(job, error))}

    def _outcome(self, run: RunFolder, job: Job, state: JobState | None) -> dict[str, Any]:
        """Record how a job ended; while its disk is full, for example, the next refresh tries again for some time."""
        try:
            return record_outcome(run, job, state)
        except LaunchError as error:
            self._report_once(f"{job.job_id}: {error}")
            ended_at = state.ended_at if state is not None else None
            if ended_at is not None and time.time() - ended_at < UNWRITABLE_GRACE_S:
                return {}
            return record_outcome(run, job, state, must_write=False)

    def _damaged(self, job: Job, error: Exception) -> dict[str, Any]:
        """Report a damaged run folder and return the columns of its row."""
        self._report_once(f"{job.job_id}: {job.run_dir} is damaged: {describe_damage(error, job.run_dir)}")
        return {"status": DAMAGED, "reason": describe_damage(error, job.run_dir)}

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


def _is_readable(job: Job) -> bool:
    """Return whether the job's run folder is there and may be entered."""
    try:
        return is_run_folder(Path(job.run_dir))
    except ConfigError:
        return False


def _unreadable(job: Job, error: Exception) -> dict[str, Any]:
    return {"status": "lost", "reason": f"its run folder cannot be read: {describe_damage(error, job.run_dir)}"}


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
