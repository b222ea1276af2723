"""Jobs whose submitter was killed between sbatch and its note of the job's id: found again, or known to be none.

What finds one, in this order: the record that llmb-run writes under the job's id, the output file that Slurm names
after it, and Slurm itself by the job's --comment. Only when all three fail, and the submitter has been gone for long
enough that no request of its can still be under way, was there never a job.
"""

import os
import time
from pathlib import Path

from llmb.cli.jobs.slurm_ending import settle_unsubmitted
from llmb.launch.run_folder import RunDir, is_alive, live_pid
from llmb.launch.slurm import slurm_jobs
from llmb.launch.slurm.submission import keep_name, read_submission
from llmb.results.job_store import Job, Store

ON_ITS_WAY_S = 60.0  # a request that sbatch sent before it was killed has reached Slurm or never will
SUBMITTER_UNSEEN_S = 600.0  # the same where the submitter is on another host, and may be waiting for Slurm itself
NEVER_SUBMITTED = "llmb-run was ended before it had submitted this job"


def find_again(store: Store, job: Job) -> Job:
    """A job that is being submitted, under its real name if it has one by now. May raise SlurmDown."""
    run = RunDir.open(Path(job.run_dir))
    slurm_id = slurm_id_of(run)
    if slurm_id is not None:
        _keep_record(run, slurm_id)
        keep_name(run, slurm_id, store.submitted(job.job_id, slurm_id))
        return store.now(job)
    if not may_yet_come(run, job.created_at):
        settle_unsubmitted(run, run.read_config(), NEVER_SUBMITTED)
        store.refused(job.job_id, NEVER_SUBMITTED)
    return store.now(job)


def slurm_id_of(run: RunDir) -> str | None:
    """What Slurm calls the job of this folder, if it has one; whoever still submits it is not interfered with."""
    known = run.job_id or _id_in_output(run)
    if known is not None or _submitter_lives(run):
        return known
    submission = read_submission(run)
    return slurm_jobs.find(submission.token) if submission is not None and submission.token else None


def may_yet_come(run: RunDir, made_at: float) -> bool:
    """Whether a job that is nowhere may still turn up."""
    lives = _submitter_lives(run)
    patience_s = ON_ITS_WAY_S if lives is False else SUBMITTER_UNSEEN_S
    return bool(lives) or time.time() - made_at <= patience_s


def _submitter_lives(run: RunDir) -> bool | None:
    return False if live_pid(run) == os.getpid() else is_alive(run)  # who asks has given up


def _keep_record(run: RunDir, slurm_id: str) -> None:
    """The job's id into its folder, which the submitter could not do any more; a job that starts does it itself."""
    if run.job_id is None:
        from llmb.cli.run_options import cluster_here
        from llmb.cli.submit_batch import cluster_facts  # slow, and hardly ever needed

        run.write_record(run.read_config(), slurm_id, "slurm", **cluster_facts(cluster_here()))


def _id_in_output(run: RunDir) -> str | None:
    """Slurm's own output file of a batch job is slurm-<jobid>.out."""
    found = sorted(run.path.glob("slurm-*.out"))
    name = found[-1].stem.removeprefix("slurm-") if found else ""
    return name if name.isdigit() else None
