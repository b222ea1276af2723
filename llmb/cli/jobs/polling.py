"""Brings the rows of jobs up to date: local ones by their processes, Slurm's by one question to Slurm for all of them.

    jobs = Poller(store).refresh(jobs)

A job that has ended gets its result from its run folder. One that Slurm has forgotten, and whose folder has no end, is
lost: how it went is not known, which is not the same as failed. While Slurm does not answer, what is known stays.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llmb.cli.jobs.lost_submissions import find_again
from llmb.cli.jobs.slurm_ending import has_end, settle
from llmb.cli.stored_runs import keep_result, load_run
from llmb.errors import ConfigError, LaunchError, LlmbError
from llmb.launch.run_folder import RunDir, is_alive
from llmb.launch.slurm.slurm_jobs import JobState, SlurmDown, states
from llmb.launch.slurm.submission import Submission, read_submission
from llmb.results.job_store import Job, Store

SETTLING_S = 5.0  # what another node wrote last may take that long to be seen on a network file system
FORGETTING_S = 60.0  # a job that Slurm has only just heard of may be missing from its answers


def say_aside(text: str) -> None:
    """A line beside the command's output."""
    print(" ".join(text.split()), file=sys.stderr, flush=True)


class Poller:
    """Asks again and again; says once when Slurm goes away and once when it is back."""

    def __init__(self, store: Store, say: Callable[[str], None] = say_aside):
        self._store = store
        self._say = say
        self._down = False  # when last asked
        self._silent = False  # in this pass: another question would only wait as long as the first
        self._said: set[str] = set()

    def refresh(self, jobs: Sequence[Job]) -> list[Job]:
        """The same jobs as they are now; what was found out is in the store."""
        self._silent = False
        found = [self._look(job) for job in jobs]
        self._ask_slurm([job for job in found if job.slurm_id and _open_end(job)])
        return [self._store.now(job) if _open_end(job) else job for job in found]

    def _look(self, job: Job) -> Job:
        """A job as far as it can be told without asking Slurm for its state."""
        try:
            if job.launcher == "local":
                return refresh_local(self._store, job) if job.going else job
            return find_again(self._store, job) if job.status == "submitting" and not self._silent else job
        except SlurmDown as down:
            self._say_down(down, [job])
        except LlmbError as error:  # a folder someone moved away must not hide the other runs
            self._say_once(f"{job.job_id}: {error}")
        return job

    def _ask_slurm(self, jobs: Sequence[Job]) -> None:
        if not jobs or self._silent:
            return
        try:
            said = states([job.slurm_id for job in jobs if job.slurm_id])
        except SlurmDown as down:
            self._say_down(down, jobs)
            return
        if self._down:
            self._say("Slurm answers again")
            self._down = False
        changes = [(job, self._news(job, said.get(job.slurm_id or ""))) for job in jobs]
        try:
            with self._store.many():
                for job, columns in changes:
                    if columns:
                        self._store.move_on(job, **columns)
        except LaunchError as error:  # what is known can still be shown
            self._say_once(str(error))

    def _news(self, job: Job, state: JobState | None) -> dict[str, Any]:
        """What to write into a job's row."""
        try:
            run = RunDir.open(Path(job.run_dir))
            submission = read_submission(run)
            given_away = state is not None and not _is_its(run, submission, state)
            if given_away:
                state = None
            goes_on = state is not None and state.phase != "ended"
            if submission is None and goes_on:  # it is in somebody's allocation, which may outlive it
                goes_on = not has_end(run)
            if state is not None and goes_on:
                return {**_slurm_columns(state, job), "status": state.phase, "reason": _why_it_waits(state)}
            ended = has_end(run)
            if state is not None and not ended and (_just_ended(state) or _moves(run)):
                return _slurm_columns(state, job)  # still going, as far as anyone can see
            if state is None and not ended:
                return _lost(job, certain=given_away)
            return settle(run, job, state)
        except LaunchError as error:  # the disk is full, say: another time
            self._say_once(f"{job.job_id}: {error}")
            return {}
        except ConfigError as error:
            columns = _slurm_columns(state, job) if state else {}
            return {**columns, "status": "lost", "reason": f"its run folder cannot be read: {error}"}

    def _say_down(self, down: SlurmDown, jobs: Iterable[Job]) -> None:
        self._silent, known = True, self._down
        self._down = True
        if known:
            return
        heard = [job.refreshed_at for job in jobs if job.refreshed_at]
        age = f"{time.time() - min(heard):.0f} s ago" if heard else "at submission"
        self._say(f"ERROR: {down}; shown is what was known {age}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._say(f"ERROR: {text}")
        self._said.add(text)


def refresh_local(store: Store, job: Job) -> Job:
    """A job that says it runs: if its process is gone from this host, find out how it ended."""
    run = RunDir.open(Path(job.run_dir))
    if is_alive(run) is not False:
        return job
    config, _ = load_run(run)
    if run.job_id is None:  # llmb-run was killed before it could
        run.write_record(config, job.job_id)
    store.finish(job.job_id, keep_result(run, config))
    return store.job(job.job_id)


def _open_end(job: Job) -> bool:
    return job.going or job.status == "lost"  # Slurm, or a file system, may be back


def _slurm_columns(state: JobState, job: Job) -> dict[str, Any]:
    """Of times, what Slurm does not say any more stays as it was."""
    return {
        "slurm_state": state.state,
        "nodes": state.nodes if state.phase == "pending" else state.nodes or job.nodes,
        "submitted_at": state.submitted_at or job.submitted_at,
        "started_at": None if state.phase == "pending" else state.started_at or job.started_at,
        "ended_at": state.ended_at if state.phase == "ended" else None,
        "refreshed_at": time.time(),
    }


def _why_it_waits(state: JobState) -> str | None:
    return state.reason if state.phase == "pending" else None


def _is_its(run: RunDir, submission: Submission | None, state: JobState) -> bool:
    """Whether Slurm speaks of this folder's job, not of another that has the same id by now."""
    if submission is None:
        return True
    at_home = state.folder is None or f"/{run.path.parent.name}/" in state.folder  # the installation may have moved
    return at_home and state.comment in (None, submission.token)


def _just_ended(state: JobState) -> bool:
    started, ended = state.started_at, state.ended_at
    return started is not None and ended is not None and 0 <= time.time() - ended < SETTLING_S


def _moves(run: RunDir) -> bool:
    """Whether its ranks still write: they may outlive what Slurm calls the job, and end well."""
    return any(time.time() - path.stat().st_mtime < SETTLING_S for path in run.all_events())


def _lost(job: Job, certain: bool) -> dict[str, Any]:
    """`certain`: its id is another job's by now, which must not be taken, and cancelled, for this one."""
    last_sign = max(job.refreshed_at or 0.0, job.submitted_at or 0.0, job.created_at)
    if job.status == "lost" or (not certain and time.time() - last_sign < FORGETTING_S):
        return {}
    return {"status": "lost", "reason": "Slurm does not know it any more, and its run folder does not say how it ended"}
