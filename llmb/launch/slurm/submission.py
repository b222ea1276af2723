"""How a Slurm job came to be: submission.json, in the run folder before Slurm knows of the job.

    keep_submission(rundir, Submission(token=new_token(), wishes=to_plain(wishes)))

A submitter that is killed after sbatch leaves a job whose id it told nobody: the token, which is the job's --comment,
finds it again. The rest is what a retry must know, and what the job store cannot know when it is made anew.
"""

from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from llmb.config.serialization import build, read_json, to_json, write_whole
from llmb.launch.run_folder import RunDir


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One call of sbatch, or a local run, and which job it tries again."""

    token: str | None  # the job's --comment; none: a local run that tries another again
    retry_of: str | None = None  # the job whose configuration this one runs again
    attempt: int = 1
    retries: int = 0  # how often a failure that is no fault of the run may be tried again
    wishes: dict[str, Any] = field(default_factory=dict)  # SlurmWishes as plain data
    name: str | None = None  # of its row, such as 17-2 where Slurm gave the id 17 twice; null: Slurm's id


def new_token() -> str:
    """A --comment that no other job has."""
    return f"llmb:{uuid4().hex}"


def keep_submission(rundir: RunDir, submission: Submission) -> None:
    """Write it beside the configuration."""
    write_whole(rundir.submission, to_json(submission) + "\n")


def keep_name(rundir: RunDir, slurm_id: str, name: str) -> None:
    """What users know the job by, where that is not Slurm's id."""
    submission = read_submission(rundir)
    if name != slurm_id and submission is not None and submission.name != name:
        keep_submission(rundir, replace(submission, name=name))


def read_submission(rundir: RunDir) -> Submission | None:
    """What was kept; none: an ordinary local run, or a submitter that was killed before it came to sbatch."""
    if not rundir.submission.exists():
        return None
    return build(Submission, read_json(rundir.submission), "submission.json")
