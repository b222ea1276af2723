"""`llmb-run jobs cancel`: ends active runs, local ones by a signal, Slurm jobs by one scancel for all of them."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from llmb.cli.jobs.job_table import filters, is_filtered
from llmb.cli.jobs.jobs import open_store, stored_job
from llmb.cli.jobs.polling import Poller
from llmb.errors import ConfigError, LaunchError, LlmbError
from llmb.formats.folder_access import owner
from llmb.launch.run_files.pid_file import is_alive, live_pid
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm import slurm_jobs
from llmb.results.job_store import Job, Store


def run(options: argparse.Namespace) -> int:
    """Cancel the named jobs, or with --all those that match the filters."""
    with open_store() as store:
        jobs = _selected(store, options)
        active = [job for job in Poller(store).refresh(jobs) if job.going]
        for job_id in {job.job_id: job for job in jobs}.keys() - {job.job_id for job in active}:
            print(f"{job_id}: has ended already")
        return _cancel_all(active)


def _selected(store: Store, options: argparse.Namespace) -> list[Job]:
    if options.job_ids and (options.all or is_filtered(options)):
        raise ConfigError("name jobs, or select them by --all and filters; not both")
    if options.job_ids:
        return [stored_job(store, name) for name in options.job_ids]
    if not options.all:
        raise ConfigError("which jobs? name them, or give --all and filters: llmb-run jobs cancel --all --on slurm")
    return [job for job in store.jobs(**filters(options)) if job.going]


def _cancel_all(jobs: Sequence[Job]) -> int:
    """Cancel local runs one by one, then all Slurm jobs together; an error with some must not spare the others."""
    on_slurm = [job for job in jobs if job.slurm_id]
    local = [[job] for job in jobs if not job.slurm_id]
    failed = False
    for group in (*local, *([on_slurm] if on_slurm else [])):
        try:
            _cancel(group)
            print("".join(f"{job.job_id}: cancelled\n" for job in group), end="")
        except LlmbError as error:
            print(f"ERROR: {', '.join(job.job_id for job in group)}: {error}", file=sys.stderr)
            failed = True
    return LaunchError.exit_code if failed else 0


def _cancel(jobs: Sequence[Job]) -> None:
    """Cancel several Slurm jobs, or one local run."""
    slurm_ids = [job.slurm_id for job in jobs if job.slurm_id]
    if slurm_ids:
        slurm_jobs.cancel(slurm_ids)
    else:
        _cancel_local(jobs[0])


def _cancel_local(job: Job) -> None:
    """Send SIGTERM to the process of a local run: it ends the engine, and llmb-run records the end."""
    if job.launcher == "slurm":
        raise ConfigError("is being submitted; wait until it has a job id")
    run = RunFolder.open(Path(job.run_dir))
    if is_alive(run) is None:
        raise ConfigError("runs on another host; cancel it there")
    pid = live_pid(run)
    if pid is not None:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:  # it has just ended
            pass
        except PermissionError as error:
            raise ConfigError(f"belongs to {owner(run.path)}, who alone can cancel it") from error
