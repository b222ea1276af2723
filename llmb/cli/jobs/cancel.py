"""`llmb-run jobs cancel`: ends runs that go on, local ones by a signal, Slurm's by one scancel for all of them."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llmb.cli.jobs.job_table import filters, is_filtered
from llmb.cli.jobs.jobs import open_store
from llmb.cli.jobs.polling import Poller
from llmb.errors import ConfigError, LaunchError, LlmbError
from llmb.launch.run_folder import RunDir, is_alive, live_pid
from llmb.launch.slurm import slurm_jobs
from llmb.results.job_store import Job, Store


def run(options: argparse.Namespace) -> int:
    """Those named, or with --all those that the filters leave."""
    with open_store() as store:
        jobs = _chosen(store, options)
        going = [job for job in Poller(store).refresh(jobs) if job.going]
        for job in {job.job_id: job for job in jobs}.keys() - {job.job_id for job in going}:
            print(f"{job}: has ended already")
        return _cancel(going)


def _chosen(store: Store, options: argparse.Namespace) -> list[Job]:
    if options.job_ids and (options.all or is_filtered(options)):
        raise ConfigError("name jobs, or choose them by --all and filters; not both")
    if options.job_ids:
        return [store.job(job_id) for job_id in options.job_ids]
    if not options.all:
        raise ConfigError("which jobs? name them, or give --all and filters: llmb-run jobs cancel --all --on slurm")
    return [job for job in store.jobs(**filters(options)) if job.going]


def _cancel(jobs: Sequence[Job]) -> int:
    """Local ones each for itself, then Slurm's together; what goes wrong with some must not spare the others."""
    on_slurm = [job for job in jobs if job.slurm_id]
    alone = [[job] for job in jobs if not job.slurm_id]
    failed = False
    for some in (*alone, *([on_slurm] if on_slurm else [])):
        try:
            _end(some)
            print("".join(f"{job.job_id}: cancelled\n" for job in some), end="")
        except LlmbError as error:
            print(f"ERROR: {', '.join(job.job_id for job in some)}: {error}", file=sys.stderr)
            failed = True
    return LaunchError.exit_code if failed else 0


def _end(jobs: Sequence[Job]) -> None:
    """Jobs of Slurm's, or one that is not."""
    slurm_ids = [job.slurm_id for job in jobs if job.slurm_id]
    if slurm_ids:
        slurm_jobs.cancel(slurm_ids)
    else:
        _end_here(jobs[0])


def _end_here(job: Job) -> None:
    """SIGTERM to the process that holds a local run: it ends the engine, and llmb-run records the end."""
    if job.launcher == "slurm":
        raise ConfigError("is being submitted; wait until it has a job id")
    run = RunDir.open(Path(job.run_dir))
    if is_alive(run) is None:
        raise ConfigError("runs on another host; cancel it there")
    pid = live_pid(run)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
