"""`llmb-run jobs retry`: runs the same configuration again, in a new folder, linked to the original job."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmb.cli.jobs.jobs import open_store, stored_job
from llmb.cli.jobs.polling import Poller
from llmb.cli.run_options import cluster_here
from llmb.cli.submit import run_again
from llmb.cli.submit_batch import JobRequest, submit_jobs
from llmb.config.native.departures import check_engine_support
from llmb.config.serialization import build
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError, LlmbError
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunFolder
from llmb.launch.secrets import MASK
from llmb.launch.slurm.job_script import SbatchOverrides
from llmb.launch.slurm.submission import read_submission
from llmb.results.job_store import Job, Store


def run(options: argparse.Namespace) -> int:
    """Retry each named job: Slurm jobs are submitted, local ones run here and now."""
    codes = [0]
    with open_store() as store:
        jobs = [stored_job(store, name) for name in options.job_ids]
        jobs = [_check_ended(job) for job in Poller(store).refresh(jobs)]
        for job in jobs:
            try:
                if job.launcher == "slurm":
                    retries = store.take_retries(job.job_id)
                    new_id = resubmit(store, job, exclude=options.exclude_node, retries=retries)
                    print(f"{job.job_id}: retried as {new_id}", flush=True)
                else:
                    codes.append(_run_locally(job, options.exclude_node))
            except LlmbError as error:
                print(f"ERROR: {job.job_id}: {error}", file=sys.stderr)
                codes.append(error.exit_code)
    return max(codes)


def resubmit(store: Store, job: Job, exclude: Sequence[str] = (), retries: int = 0) -> str:
    """Submit a Slurm job again, excluding these nodes; return the id of the new job."""
    run = RunFolder.open(Path(job.run_dir))
    config, submission = _supported_config(run), read_submission(run)
    sbatch_overrides = (
        build(SbatchOverrides, submission.sbatch_overrides, "submission.json") if submission else SbatchOverrides()
    )
    excluded = [node for node in (sbatch_overrides.exclude, *exclude) if node]
    request = JobRequest(
        config=config,
        environment=_with_secrets(config.environment),
        sbatch_overrides=replace(sbatch_overrides, exclude=",".join(dict.fromkeys(excluded)) or None),
        retry_of=job.job_id,
        attempt=job.attempt + 1,
        retries=retries,
        force=submission is not None and submission.force,
        report=submission is None or submission.report,
    )
    (sent,) = submit_jobs([request], cluster_here(), install_root(os.environ), store, on_sent=lambda sent: None)
    if sent.error is not None:
        raise sent.error
    return sent.job_id


def _run_locally(job: Job, exclude: Sequence[str]) -> int:
    if exclude:
        raise ConfigError("--exclude-node has no effect on a local run; leave it out")
    config = _supported_config(RunFolder.open(Path(job.run_dir)))
    return run_again(config, _with_secrets(config.environment), retry_of=job.job_id, attempt=job.attempt + 1)


def _supported_config(run: RunFolder) -> RunConfig:
    """Return the stored configuration; raise if the engine does not run it: an older version may have."""
    config = run.read_config()
    check_engine_support(config)
    return config


def _check_ended(job: Job) -> Job:
    """Return the job if it has ended; it is an error to retry an active or imported one."""
    if job.going:
        raise ConfigError(f"job {job.job_id} is {job.status}; cancel it first: llmb-run jobs cancel {job.job_id}")
    if job.launcher not in ("local", "slurm"):
        raise ConfigError(f"job {job.job_id} was run on another cluster; submit it here: llmb-run submit --help")
    return job


def _with_secrets(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with its secrets, which no run folder stores, taken from this process's environment."""
    missing = [name for name, value in environment.items() if value == MASK and name not in os.environ]
    if missing:
        raise ConfigError(f"the run had {missing[0]} set, which no file holds; set it again: export {missing[0]}=...")
    return {name: os.environ[name] if value == MASK else value for name, value in environment.items()}
