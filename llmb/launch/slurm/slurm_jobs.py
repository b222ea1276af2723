"""Slurm jobs: submit, query hundreds at once, cancel, find again.

    job_id = submit(script, ["--nodes=2"], environment)
    states([job_id])  -> {job_id: JobState(phase="running", state="RUNNING", nodes="n[1-2]", ...)}

One squeue reports every job that the controller holds. Those it has purged, some minutes after their end, are looked up
in the accounting database, or where there is none, in the job completion file. A job in none of them is left out. A
controller that crashed may have lost its newest jobs and reuse their ids: compare `JobState.comment`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmb.errors import ConfigError
from llmb.launch.slurm.cluster_facts import configuration
from llmb.launch.slurm.job_states import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    JobState,
    parse_completions,
    parse_sacct,
    parse_squeue,
)
from llmb.launch.slurm.slurm_command import SlurmUnavailable, run_slurm, unexpected_output

__all__ = ["JobState", "SlurmUnavailable", "cancel", "find_by_comment", "states", "submit"]

SUBMIT_TIMEOUT_S = 90.0  # sbatch itself retries for a while when the controller is busy
IDS_PER_COMMAND = 1000
COMPLETION_TAIL_BYTES = 64 << 20  # read at the end of a job completion file, which grows for ever
SEARCHED_DAYS = 14  # how far back a lost submission is searched
NO_ACCOUNTING = "accounting storage is disabled"


def submit(script: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Submit a job and return its id. `environment`: of sbatch, and by Slurm's default of the job; None: os.environ."""
    command = ["sbatch", "--parsable", *arguments, str(script)]
    output = run_slurm(command, os.environ if environment is None else environment, SUBMIT_TIMEOUT_S)
    if output.exit_code:
        reason = output.stderr.replace("Batch job submission failed: ", "").partition("; Try ")[0]
        raise ConfigError(f"Slurm refuses the job: {reason or f'sbatch exit {output.exit_code}'}")
    job_id = output.stdout.strip().partition(";")[0]  # with several clusters: id;cluster
    if not job_id.isdigit():
        raise unexpected_output(command, output)
    return job_id


def states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Return the state of each of these jobs that Slurm knows, by id."""
    jobs: dict[str, JobState] = {}
    for chunk in _chunks(job_ids):
        jobs |= _from_controller(chunk)
        purged = [job_id for job_id in chunk if job_id not in jobs]
        if purged:
            jobs |= _from_accounting(purged)
    return jobs


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs; those that have ended already stay as they are."""
    for chunk in _chunks(job_ids):
        output = run_slurm(["scancel", *chunk])
        if "denied" in output.stderr.lower():
            raise ConfigError(f"Slurm refuses to cancel: {output.stderr}")


def find_by_comment(comment: str) -> str | None:
    """Return the id of this user's newest job with exactly this --comment."""
    user = str(os.getuid())
    command = ["squeue", "--all", "--noheader", "--states=all", f"--user={user}", f"--Format={SQUEUE_FORMAT}"]
    output = run_slurm(command)
    if output.exit_code:
        raise unexpected_output(command, output)
    job_ids = [job.job_id for job in parse_squeue(output.stdout).values() if job.comment == comment]
    if not job_ids:
        since = f"--starttime=now-{SEARCHED_DAYS}days"
        accounted = _sacct([f"--user={user}", since], "JobIDRaw,Comment") or ""
        job_ids = [line.partition("|")[0] for line in accounted.splitlines() if line.partition("|")[2] == comment]
    return max(job_ids, key=int, default=None)


def _from_controller(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Return the jobs in the controller's memory."""
    command = [
        "squeue",
        "--all",
        "--noheader",
        "--states=all",
        f"--jobs={','.join(job_ids)}",
        f"--Format={SQUEUE_FORMAT}",
    ]
    output = run_slurm(command)
    if output.exit_code and "Invalid job id" not in output.stderr:  # printed only for a single id
        raise unexpected_output(command, output)
    return parse_squeue(output.stdout)


def _from_accounting(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Return the jobs that have ended, from the accounting database or the job completion file."""
    rows = _sacct(["--duplicates", f"--jobs={','.join(job_ids)}"], SACCT_FORMAT)
    if rows is not None:
        return parse_sacct(rows)
    settings = configuration()
    if settings.get("JobCompType") != "jobcomp/filetxt":
        return {}
    try:
        with open(settings.get("JobCompLoc", ""), errors="replace") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - COMPLETION_TAIL_BYTES))
            return parse_completions(file, set(job_ids))
    except OSError:  # on the controller's host only, or readable by its administrator only
        return {}


def _sacct(selection: Sequence[str], fields: str) -> str | None:
    """Return the output of sacct; None: there is no accounting."""
    command = ["sacct", "--allocations", "--noheader", "--parsable2", *selection, f"--format={fields}"]
    output = run_slurm(command)
    if output.exit_code:
        if NO_ACCOUNTING in output.stderr:
            return None
        raise unexpected_output(command, output)
    return output.stdout


def _chunks(job_ids: Sequence[str]) -> Iterator[list[str]]:
    """Split the ids over command lines. An id that is not Slurm's is dropped: it would fail the query for all."""
    unique = [job_id for job_id in dict.fromkeys(job_ids) if job_id.isdigit()]
    for first in range(0, len(unique), IDS_PER_COMMAND):
        yield unique[first : first + IDS_PER_COMMAND]
