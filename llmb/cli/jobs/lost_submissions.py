"""Recovers jobs whose submitter was killed between sbatch and recording the job id, or finds that there is none.

Searched in this order: the record that llmb-run writes under the job id, the output file that Slurm names after it, and
Slurm itself by the job's --comment. If all three fail, and the submitter has been gone for so long that no request of
its can still be pending, the job was never submitted. Slurm is asked for jobs of this user only, so a submission of
another user on the same installation is left to them.
"""

import os
import time
from pathlib import Path

from llmb.cli.jobs.job_outcome import record_unsubmitted
from llmb.formats.folder_access import is_own
from llmb.launch.run_files.pid_file import is_alive, live_pid
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm import slurm_jobs
from llmb.launch.slurm.submission import read_submission, record_job_name
from llmb.results.job_store import Job, Store

REQUEST_TIMEOUT_S = 60.0  # by then a request of a killed sbatch has reached Slurm or never will
REMOTE_SUBMITTER_TIMEOUT_S = 600.0  # where the submitter is on another host, and may itself wait for Slurm
NEVER_SUBMITTED = "llmb-run was ended before it submitted this job"


def recover_submission(store: Store, job: Job) -> Job:
    """Return a job that is being submitted, under its real id if it has one by now. May raise SlurmUnavailable."""
    run = RunFolder.open(Path(job.run_dir))
    slurm_id = find_slurm_id(run)
    if slurm_id is not None:
        _write_missing_record(run, slurm_id)
        name = store.submitted(job.job_id, slurm_id)
        record_job_name(run, slurm_id, name)
        run.add_short_path(name)
        return store.now(job)
    if not may_still_appear(run, job.created_at):
        reason = f"never submitted: {job.reason}" if job.reason else NEVER_SUBMITTED
        record_unsubmitted(run, run.read_config(), reason)
        store.refused(job.job_id, reason)
    return store.now(job)


def find_slurm_id(run: RunFolder) -> str | None:
    """Return the Slurm id of this folder's job, if it has one; Slurm is not asked while a submitter is alive."""
    job_id = run.job_id or _id_from_output(run)
    if job_id is not None or _submitter_is_alive(run):
        return job_id
    submission = read_submission(run)
    return slurm_jobs.find_by_comment(submission.token) if submission is not None and submission.token else None


def may_still_appear(run: RunFolder, created_at: float) -> bool:
    """Return whether a job that was not found may still appear."""
    if not is_own(run.path):
        return True
    alive = _submitter_is_alive(run)
    timeout_s = REQUEST_TIMEOUT_S if alive is False else REMOTE_SUBMITTER_TIMEOUT_S
    return bool(alive) or time.time() - created_at <= timeout_s


def _submitter_is_alive(run: RunFolder) -> bool | None:
    return False if live_pid(run) == os.getpid() else is_alive(run)  # this process has given up


def _write_missing_record(run: RunFolder, slurm_id: str) -> None:
    """Write the job id into its folder, as the submitter could not; a job that starts does it itself."""
    if run.job_id is None:
        from llmb.cli.run_options import cluster_here
        from llmb.cli.submit_batch import cluster_facts  # slow to import and rarely needed

        run.write_record(run.read_config(), slurm_id, "slurm", **cluster_facts(cluster_here()))


def _id_from_output(run: RunFolder) -> str | None:
    """Return the id in the name of Slurm's output file, slurm-<jobid>.out."""
    outputs = sorted(run.path.glob("slurm-*.out"))
    name = outputs[-1].stem.removeprefix("slurm-") if outputs else ""
    return name if name.isdigit() else None
