"""Run folders that cannot be read: one of them never stops a command that goes over all of them.

Whatever is wrong with a folder's content is caught at the folder, named, and listed as `damaged`.
"""

import sys
from pathlib import Path

from llmb.launch.run_folder import RunFolder, printable_path
from llmb.results.job_store import Job, folder_id

DAMAGED = "damaged"


def describe_damage(error: Exception, folder: str | Path) -> str:
    """Return in one line what is wrong, by names in the folder; an error that nobody foresaw with its type."""
    from llmb.errors import LlmbError

    text = str(error) if isinstance(error, LlmbError) else f"{type(error).__name__}: {error}"
    return " ".join(text.replace(f"{folder}/", "").split())[:300]


def report_damage(run: RunFolder, error: Exception) -> None:
    """Name a damaged folder and what is wrong with it on stderr."""
    print(f"ERROR: {printable_path(run.path)} is damaged: {describe_damage(error, run.path)}", file=sys.stderr)


def damaged_row(run: RunFolder, error: Exception) -> Job:
    """Return the row of a damaged folder, of which only the path is known."""
    created_at = creation_time(run)
    return Job(
        job_id=folder_id(run.path, "D"), launcher="local", workload=run.path.parents[3].name, size=run.name, dtype=None,
        scale=None, gpu=None, proxy=None, profile=False, name=run.name, run_dir=str(run.path), created_at=created_at,
        updated_at=created_at, status=DAMAGED, reason=describe_damage(error, run.path),
    )  # fmt: skip


def creation_time(run: RunFolder) -> float:
    """Return the creation time by the folder's name; 0 where neither name nor config.json has one."""
    try:
        return run.created_at
    except OSError:
        return 0.0
