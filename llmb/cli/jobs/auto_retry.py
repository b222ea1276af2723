"""Resubmits jobs that failed for reasons outside themselves, up to `submit --retries N` times, excluding failed nodes.

There is no daemon: `jobs --watch` and `jobs refresh` do it. The remaining retries move from the failed job to the one
that retries it, in one transaction, so that two watchers do not both submit it.
"""

from collections.abc import Callable
from pathlib import Path

from llmb.cli.jobs.job_outcome import read_job_outcome
from llmb.cli.jobs.polling import print_to_stderr
from llmb.cli.jobs.retry import resubmit
from llmb.errors import LlmbError
from llmb.formats.folder_access import is_own
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.slurm_jobs import SlurmUnavailable, states
from llmb.results.job_store import Job, Store


def retry_failed(store: Store, log: Callable[[str], None] = print_to_stderr) -> list[str]:
    """Resubmit the jobs that are to be retried; return the ids of the new jobs."""
    jobs = own_jobs_to_retry(store)
    if not jobs or not _slurm_responds(jobs):
        return []
    new_ids = (_retry(store, job, log) for job in jobs)
    return [job_id for job_id in new_ids if job_id is not None]


def own_jobs_to_retry(store: Store) -> list[Job]:
    """Return the ended jobs of this user with retries left: a job of another would run under this user's account."""
    return [job for job in store.jobs_to_retry() if is_own(Path(job.run_dir))]


def _slurm_responds(jobs: list[Job]) -> bool:
    """Return whether Slurm responds; if not, the refresh has already reported it."""
    try:
        states([job.slurm_id or "" for job in jobs])
    except SlurmUnavailable:
        return False
    return True


def _retry(store: Store, job: Job, log: Callable[[str], None]) -> str | None:
    retries = store.take_retries(job.job_id)
    if retries == 0:  # another watcher took them first
        return None
    try:
        outcome = read_job_outcome(RunFolder.open(Path(job.run_dir)))
        excluded = outcome.excluded_nodes if outcome else ()
        new_id = resubmit(store, job, exclude=excluded, retries=retries - 1)
    except LlmbError as error:  # no node left, or the run folder is gone: another attempt would fail as well
        log(f"ERROR: {job.job_id}: cannot be retried: {error}")
        return None
    message = f"{job.job_id}: {job.reason or job.status}; retried as {new_id}"
    log(f"{message}, excluding {','.join(excluded)}" if excluded else message)
    return new_id
