"""`llmb-run jobs rebuild`: the job store from run folders alone, the same rows under the same names."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmb.cli.jobs.imported_rows import imported_row
from llmb.cli.jobs.jobs import open_store
from llmb.cli.jobs.lost_submissions import may_yet_come, slurm_id_of
from llmb.cli.jobs.polling import Poller
from llmb.cli.jobs.slurm_ending import read_ending
from llmb.cli.stored_runs import keep_result, load_run
from llmb.config.serialization import read_json
from llmb.errors import LlmbError
from llmb.launch.archive.run_origin import origin_of
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunDir, is_alive
from llmb.launch.slurm.slurm_jobs import SlurmDown
from llmb.launch.slurm.submission import read_submission
from llmb.results.job_store import Job, described, figures, temporary_id


def run(_: argparse.Namespace) -> int:
    """A folder that cannot be read is named and left out."""
    with open_store() as store:
        known = {job.run_dir for job in store.jobs()}
        rows, unreadable = [], 0
        for run in sorted(RunDir.find_all(install_root(os.environ)), key=_made):
            try:
                if came_to_be(run):
                    rows.append(row_of(run))
            except LlmbError as error:
                print(f"ERROR: {error}", file=sys.stderr)
                unreadable += 1
        store.replace_all(_named_first(_without_spent_retries(_told_apart(rows))), known)
        Poller(store).refresh([job for job in store.jobs() if job.going])
    print(f"{len(rows)} runs found" + (f", {unreadable} folders could not be read" if unreadable else ""))
    return 0


def came_to_be(run: RunDir) -> bool:
    """Whether there was ever a run: llmb-run may have been killed when it had made the folder and nothing else.

    Whoever found a row of such a folder has written an ending or a result beside it.
    """
    if run.job_id or run.ending.exists() or run.result.exists() or run.all_events() or is_alive(run):
        return True
    if read_submission(run) is None:
        return False
    try:
        return slurm_id_of(run) is not None or may_yet_come(run, run.created_at)
    except SlurmDown:
        return True


def row_of(run: RunDir) -> Job:
    """What the store would hold of the run in this folder."""
    origin = origin_of(run)
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


def _local_row(run: RunDir) -> Job:
    over = is_alive(run) is False  # looked up first: what is read of a run that goes on may be old by now
    config, result = load_run(run)
    columns: dict[str, Any] = {"status": "running"}
    if over:
        if not run.result.exists():
            result = keep_result(run, config)
        columns = {**figures(result), "updated_at": run.result.stat().st_mtime}
    return described(config, run.path, "local", run.job_id or "", run.created_at, **columns)


def _slurm_row(run: RunDir, submitted: bool) -> Job:
    """As the last refresh left it; one that had not ended then is looked at again.

    Where it was not submitted it ran in somebody's allocation, which may go on without it.
    """
    ending = read_ending(run)  # looked up first: it is written behind its result
    has_result = run.result.exists()
    config, result = load_run(run)
    columns: dict[str, Any] = {"status": "pending" if run.job_id else "submitting"}
    if ending is not None:
        columns = {**figures(result), **ending.columns, "updated_at": run.ending.stat().st_mtime}
    elif not submitted and has_result:
        nodes = read_json(run.allocation).get("nodes")
        columns = {**figures(result), "nodes": nodes, "updated_at": run.result.stat().st_mtime}
    return described(config, run.path, "slurm", run.job_id or temporary_id(run.path), run.created_at, **columns)


def _is_retryable(run: RunDir) -> bool:
    ending = read_ending(run)
    return ending is not None and ending.retryable


def _made(run: RunDir) -> tuple[float, int]:
    """When, finer than the second that a folder's name tells: hundreds may be made in one."""
    return run.created_at, run.config.stat().st_mtime_ns


def _told_apart(rows: Sequence[Job]) -> list[Job]:
    """Where Slurm gave an id twice, as after a crash that took its newest jobs, and no folder says who is called how:
    the job whose record is older has it.
    """
    given: Counter[str] = Counter()
    names: dict[str, str] = {}
    for job in sorted((job for job in rows if job.job_id), key=_named_at):
        given[job.job_id] += 1
        times = given[job.job_id]
        names[job.run_dir] = job.job_id if times == 1 else f"{job.job_id}-{times}"
    return [replace(job, job_id=names.get(job.run_dir, "")) for job in rows]


def _named_at(job: Job) -> int:
    record = RunDir(Path(job.run_dir)).record(job.job_id)
    return record.stat().st_mtime_ns if record.exists() else 0


def _without_spent_retries(rows: Sequence[Job]) -> list[Job]:
    """A job that was tried again has handed its retries on."""
    tried_again = {job.retry_of for job in rows}
    return [replace(job, retries=0) if job.job_id in tried_again else job for job in rows]


def _named_first(rows: Sequence[Job]) -> list[Job]:
    """Local runs whose id was never written down get a new one, after those that have theirs."""
    return sorted(rows, key=lambda job: not job.job_id)
