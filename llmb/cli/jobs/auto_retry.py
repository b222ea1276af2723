"""Tries again what failed through no fault of its own, as often as `submit --retries N` allows, without guilty nodes.

No daemon does it: whoever watches or refreshes jobs does. The retries that are left move from the job that failed to
the one that tries it again, in one transaction, so that two who watch do not both submit it.
"""

from collections.abc import Callable
from pathlib import Path

from llmb.cli.jobs.polling import say_aside
from llmb.cli.jobs.retry import resubmit
from llmb.cli.jobs.slurm_ending import read_ending
from llmb.errors import LlmbError
from llmb.launch.run_folder import RunDir
from llmb.launch.slurm.slurm_jobs import SlurmDown, states
from llmb.results.job_store import Job, Store


def retry_failed(store: Store, say: Callable[[str], None] = say_aside) -> list[str]:
    """Submit those that are worth it; gives the new jobs' ids."""
    jobs = store.to_be_tried_again()
    if not jobs or not _answers(jobs):
        return []
    tried = (_try_again(store, job, say) for job in jobs)
    return [job_id for job_id in tried if job_id is not None]


def _answers(jobs: list[Job]) -> bool:
    """Whether Slurm does; where not, whoever refreshed has said so."""
    try:
        states([job.slurm_id or "" for job in jobs])
    except SlurmDown:
        return False
    return True


def _try_again(store: Store, job: Job, say: Callable[[str], None]) -> str | None:
    left = store.take_retries(job.job_id)
    if left == 0:  # another was quicker
        return None
    try:
        ending = read_ending(RunDir.open(Path(job.run_dir)))
        without = ending.guilty_nodes if ending else ()
        again = resubmit(store, job, exclude=without, retries=left - 1)
    except LlmbError as error:  # Slurm has no node left for it, or its folder is gone: once more would be no better
        say(f"ERROR: {job.job_id}: cannot be tried again: {error}")
        return None
    said = f"{job.job_id}: {job.reason or job.status}; again as {again}"
    say(f"{said}, without {','.join(without)}" if without else said)
    return again
