"""Record of a submission, submission.json, written to the run folder before sbatch is called.

    write_submission(run_folder, Submission(token=new_token(), sbatch_overrides=to_plain(overrides)))

A submitter that is killed after sbatch leaves a job whose id is recorded nowhere: the token, which is the job's
--comment, finds it again. The other fields are for a retry, and for rebuilding the job store.
"""

from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from llmb.config.serialization import build, read_json, to_json, write_atomic
from llmb.launch.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One call of sbatch, or a local run, and which job it retries."""

    token: str | None  # the job's --comment; None: a local run that is a retry
    retry_of: str | None = None  # the job that this one retries
    attempt: int = 1
    retries: int = 0  # left for failures that are not the run's own fault
    force: bool = False  # start on nodes with too little memory too
    report: bool = True  # write report.html when the job ends
    sbatch_overrides: dict[str, Any] = field(default_factory=dict)  # SbatchOverrides as plain data
    name: str | None = None  # of its row, such as 17-2 where Slurm reused the id 17; None: Slurm's id


def new_token() -> str:
    """Return a unique --comment."""
    return f"llmb:{uuid4().hex}"


def write_submission(run_folder: RunFolder, submission: Submission) -> None:
    """Write submission.json."""
    write_atomic(run_folder.submission, to_json(submission) + "\n")


def record_job_name(run_folder: RunFolder, slurm_id: str, name: str) -> None:
    """Record the name that users know the job by, where that is not Slurm's id."""
    submission = read_submission(run_folder)
    if name != slurm_id and submission is not None and submission.name != name:
        write_submission(run_folder, replace(submission, name=name))


def read_submission(run_folder: RunFolder) -> Submission | None:
    """Read submission.json; None: an ordinary local run, or a submitter that was killed before sbatch."""
    if not run_folder.submission.exists():
        return None
    return build(Submission, read_json(run_folder.submission), "submission.json")
