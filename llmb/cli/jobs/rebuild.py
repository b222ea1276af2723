"""`llmb-run jobs rebuild`: the job store from run folders alone, with the same rows under the same ids."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmb.cli.jobs.damaged_runs import creation_time, damaged_row, report_damage
from llmb.cli.jobs.imported_rows import imported_row
from llmb.cli.jobs.job_outcome import read_job_outcome
from llmb.cli.jobs.jobs import open_store
from llmb.cli.jobs.lost_submissions import find_slurm_id, may_still_appear
from llmb.cli.jobs.polling import Poller
from llmb.cli.stored_runs import load_run, write_result
from llmb.config.serialization import convert, read_json
from llmb.launch.archive.run_origin import read_origin
from llmb.launch.install_root import install_root
from llmb.launch.run_files.pid_file import is_alive
from llmb.launch.run_files.short_path import short_paths
from llmb.launch.run_folder import RunFolder, printable_path, workload_path
from llmb.launch.slurm.slurm_jobs import SlurmUnavailable
from llmb.launch.slurm.submission import read_submission
from llmb.perfmodel.garbage_collection import paused_garbage_collection
from llmb.results.job_store import Job, figures, job_row, row_values, temporary_id


def run(_: argparse.Namespace) -> int:
    """Rebuild the store; a folder that cannot be read is reported and listed as damaged."""
    with open_store() as store, paused_garbage_collection():
        old_links = list(short_paths(install_root(os.environ)).glob("*"))
        old_jobs = store.jobs()
        known_run_dirs = {job.run_dir for job in old_jobs}
        rows, damaged = [], []
        for folder in _unreadable_folders(install_root(os.environ)):
            inside = [job for job in old_jobs if folder in (Path(job.run_dir), *Path(job.run_dir).parents)]
            print(f"ERROR: cannot read {printable_path(folder)}: {len(inside)} known runs are kept", file=sys.stderr)
            rows += inside
        for run in sorted(RunFolder.find_all(install_root(os.environ)), key=_created_at):
            try:
                if was_started(run):
                    row = row_from_folder(run)
                    row_values(row)  # of a damaged configuration SQLite may not take them
                    rows.append(row)
            except Exception as error:  # whatever its files hold, the other runs come back
                report_damage(run, error)
                damaged.append(damaged_row(run, error))
        rows += damaged
        store.replace_all(_with_ids_first(_without_spent_retries(_with_unique_ids(rows))), known_run_dirs)
        _relink(store.jobs(), old_links)
        Poller(store).refresh([job for job in store.jobs() if job.going])
    print(f"{len(rows)} runs found" + (f", {len(damaged)} of them damaged" if damaged else ""))
    return 0


def _unreadable_folders(install: Path) -> list[Path]:
    """Return the folders that may hold runs and that this user cannot look into: their runs are not gone."""
    workloads, levels = workload_path(install, ""), ("*", "*/experiments", "*/experiments/*", "*/experiments/*/*")
    folders = [workloads, *(folder for level in (*levels, "*/experiments/*/*/*") for folder in workloads.glob(level))]
    return [folder for folder in folders if not os.access(folder, os.R_OK | os.X_OK) and folder.is_dir()]


def _relink(jobs: Sequence[Job], old_links: Sequence[Path]) -> None:
    """Give each job its short path again, and remove those of other ids."""
    # The id of a submission is not final.
    current = {RunFolder(Path(job.run_dir)).add_short_path(job.job_id) for job in jobs if job.status != "submitting"}
    for link in old_links:
        if link not in current and link.is_symlink() and os.readlink(link).startswith("../workloads/"):
            link.unlink()


def was_started(run: RunFolder) -> bool:
    """Return whether a run was ever started: llmb-run may have been killed right after it created the folder.

    A refresh that found a row of such a folder has written an outcome or a result into it.
    """
    if run.job_id or run.job_outcome.exists() or run.result.exists() or run.all_events() or is_alive(run):
        return True
    if read_submission(run) is None:
        return False
    try:
        return find_slurm_id(run) is not None or may_still_appear(run, run.created_at)
    except SlurmUnavailable:
        return True


def row_from_folder(run: RunFolder) -> Job:
    """Return the row of the run in this folder."""
    origin = read_origin(run)
    if origin is not None:
        return imported_row(run, origin)
    submission = read_submission(run)
    on_slurm = (submission is not None and submission.token) or run.allocation.exists()
    row = _slurm_row(run, submission is not None) if on_slurm else _local_row(run)
    if submission is None:
        return row
    retries = submission.retries if row.going or _is_retryable(run) else 0
    name = submission.name or row.job_id
    return replace(row, job_id=name, retry_of=submission.retry_of, attempt=submission.attempt, retries=retries)


def _local_row(run: RunFolder) -> Job:
    ended = is_alive(run) is False  # checked first: a run that ends later may still change what is read here
    config, result = load_run(run)
    columns: dict[str, Any] = {"status": "running"}
    if ended:
        if not run.result.exists():
            result = write_result(run, config)
        columns = {**figures(result), "updated_at": run.result.stat().st_mtime}
    return job_row(config, run.path, "local", run.job_id or "", run.created_at, **columns)


def _slurm_row(run: RunFolder, submitted: bool) -> Job:
    """Return the row as of the last refresh; a job that had not ended then is refreshed afterwards.

    A run that was not submitted ran in the user's allocation, which may outlive it.
    """
    outcome = read_job_outcome(run)  # read first: it is written after its result
    has_result = run.result.exists()
    config, result = load_run(run)
    columns: dict[str, Any] = {"status": "pending" if run.job_id else "submitting"}
    if outcome is not None:
        columns = {**figures(result), **outcome.columns, "updated_at": run.job_outcome.stat().st_mtime}
    elif not submitted and has_result:
        nodes = convert(dict[str, Any], read_json(run.allocation), "allocation.json").get("nodes")
        columns = {**figures(result), "nodes": nodes, "updated_at": run.result.stat().st_mtime}
    return job_row(config, run.path, "slurm", run.job_id or temporary_id(run.path), run.created_at, **columns)


def _is_retryable(run: RunFolder) -> bool:
    outcome = read_job_outcome(run)
    return outcome is not None and outcome.retryable


def _created_at(run: RunFolder) -> tuple[float, int]:
    """Return the creation time, finer than the second in the folder's name: hundreds may be created in one."""
    try:
        return run.created_at, run.config.stat().st_mtime_ns
    except OSError:  # reported when the folder is read
        return creation_time(run), 0


def _with_unique_ids(rows: Sequence[Job]) -> list[Job]:
    """Return the rows with unique ids. After a crash Slurm may assign the ids of its newest jobs again: where no folder
    stores the name of its job, the one with the oldest record keeps the id.
    """
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for job in sorted((job for job in rows if job.job_id), key=_recorded_at):
        counts[job.job_id] += 1
        count = counts[job.job_id]
        names[job.run_dir] = job.job_id if count == 1 else f"{job.job_id}-{count}"
    return [replace(job, job_id=names.get(job.run_dir, "")) for job in rows]


def _recorded_at(job: Job) -> int:
    try:
        return RunFolder(Path(job.run_dir)).record(job.job_id).stat().st_mtime_ns
    except OSError:
        return 0


def _without_spent_retries(rows: Sequence[Job]) -> list[Job]:
    """Return the rows without the retries of retried jobs, which passed them on."""
    retried = {job.retry_of for job in rows}
    return [replace(job, retries=0) if job.job_id in retried else job for job in rows]


def _with_ids_first(rows: Sequence[Job]) -> list[Job]:
    """Return rows with an id before local runs whose id was never recorded, which get a new one."""
    return sorted(rows, key=lambda job: not job.job_id)
