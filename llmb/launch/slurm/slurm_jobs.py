"""Slurm's jobs: submit, ask after hundreds at once, cancel, find again.

    job_id = submit(script, ["--nodes=2"], environment)
    states([job_id])  -> {job_id: JobState(phase="running", state="RUNNING", nodes="n[1-2]", ...)}

One squeue tells of every job that the controller holds. Those it has forgotten, some minutes after their end, are
looked up in the accounts, or where Slurm keeps none, in its job completion file. A job in none of them is left out. A
controller that crashed may have lost its newest jobs and give their ids to others: compare `JobState.comment`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmb.errors import ConfigError
from llmb.launch.slurm.cluster_facts import configuration
from llmb.launch.slurm.job_states import SACCT, SQUEUE, JobState, read_completions, read_sacct, read_squeue
from llmb.launch.slurm.slurm_command import SlurmDown, call, fail

__all__ = ["JobState", "SlurmDown", "cancel", "find", "states", "submit"]

SUBMIT_S = 90.0  # sbatch itself tries again for a while when the controller is busy
AT_ONCE = 1000  # ids in one command line
COMPLETIONS_READ = 64 << 20  # bytes at the end of a job completion file, which grows for ever
ACCOUNTED_DAYS = 14  # how far back a lost submission is searched
NO_ACCOUNTS = "accounting storage is disabled"


def submit(script: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The job's id. `environment`: all of sbatch's own, and by Slurm's default the job's; none: this process's."""
    command = ["sbatch", "--parsable", *arguments, str(script)]
    answer = call(command, os.environ if environment is None else environment, SUBMIT_S)
    if answer.code:
        why = answer.error.replace("Batch job submission failed: ", "").partition("; Try ")[0]
        raise ConfigError(f"Slurm refuses the job: {why or f'sbatch exit {answer.code}'}")
    job_id = answer.out.strip().partition(";")[0]  # with several clusters: id;cluster
    if not job_id.isdigit():
        raise fail(command, answer)
    return job_id


def states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Those of these jobs that Slurm knows, by id."""
    found: dict[str, JobState] = {}
    for some in _portions(job_ids):
        found |= _held(some)
        forgotten = [job_id for job_id in some if job_id not in found]
        if forgotten:
            found |= _remembered(forgotten)
    return found


def cancel(job_ids: Sequence[str]) -> None:
    """End them; those that have ended already stay as they are."""
    for some in _portions(job_ids):
        answer = call(["scancel", *some])
        if "denied" in answer.error.lower():
            raise ConfigError(f"Slurm refuses to cancel: {answer.error}")


def find(comment: str) -> str | None:
    """The id of this user's newest job with exactly this --comment."""
    user = str(os.getuid())
    command = ["squeue", "--all", "--noheader", "--states=all", f"--user={user}", f"--Format={SQUEUE}"]
    answer = call(command)
    if answer.code:
        raise fail(command, answer)
    found = [job.job_id for job in read_squeue(answer.out).values() if job.comment == comment]
    if not found:
        since = f"--starttime=now-{ACCOUNTED_DAYS}days"
        accounted = _sacct([f"--user={user}", since], "JobIDRaw,Comment") or ""
        found = [line.partition("|")[0] for line in accounted.splitlines() if line.partition("|")[2] == comment]
    return max(found, key=int, default=None)


def _held(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Jobs in the controller's memory."""
    command = ["squeue", "--all", "--noheader", "--states=all", f"--jobs={','.join(job_ids)}", f"--Format={SQUEUE}"]
    answer = call(command)
    if answer.code and "Invalid job id" not in answer.error:  # which it says of a single one
        raise fail(command, answer)
    return read_squeue(answer.out)


def _remembered(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Jobs that have ended and are in Slurm's records."""
    accounts = _sacct(["--duplicates", f"--jobs={','.join(job_ids)}"], SACCT)
    if accounts is not None:
        return read_sacct(accounts)
    settings = configuration()
    if settings.get("JobCompType") != "jobcomp/filetxt":
        return {}
    try:
        with open(settings.get("JobCompLoc", ""), errors="replace") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - COMPLETIONS_READ))
            return read_completions(file, set(job_ids))
    except OSError:  # on the controller's host only, or for its administrator's eyes
        return {}


def _sacct(choice: Sequence[str], fields: str) -> str | None:
    """What the accounts say; None: there are none."""
    command = ["sacct", "--allocations", "--noheader", "--parsable2", *choice, f"--format={fields}"]
    answer = call(command)
    if answer.code:
        if NO_ACCOUNTS in answer.error:
            return None
        raise fail(command, answer)
    return answer.out


def _portions(job_ids: Sequence[str]) -> Iterator[list[str]]:
    """Few enough for a command line each. An id of another kind than Slurm's would spoil the question for all."""
    unique = [job_id for job_id in dict.fromkeys(job_ids) if job_id.isdigit()]
    for first in range(0, len(unique), AT_ONCE):
        yield unique[first : first + AT_ONCE]
