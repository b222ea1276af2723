"""`llmb-run jobs retry`: the same configuration once more, in a new folder, linked to the job it tries again."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmb.cli.jobs.jobs import open_store
from llmb.cli.jobs.polling import Poller
from llmb.cli.run_options import cluster_here
from llmb.cli.submit import run_again
from llmb.cli.submit_batch import JobRequest, submit_jobs
from llmb.config.serialization import build
from llmb.errors import ConfigError, LlmbError
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunDir
from llmb.launch.secrets import MASK
from llmb.launch.slurm.job_script import SlurmWishes
from llmb.launch.slurm.submission import read_submission
from llmb.results.job_store import Job, Store


def run(options: argparse.Namespace) -> int:
    """Each that is named: Slurm's are submitted, local ones run here and now."""
    codes = [0]
    with open_store() as store:
        jobs = [_ended(job) for job in Poller(store).refresh([store.job(job_id) for job_id in options.job_ids])]
        for job in jobs:
            try:
                if job.launcher == "slurm":
                    left = store.take_retries(job.job_id)
                    again = resubmit(store, job, exclude=options.exclude_node, retries=left)
                    print(f"{job.job_id}: again as {again}", flush=True)
                else:
                    codes.append(_run_here(job, options.exclude_node))
            except LlmbError as error:
                print(f"ERROR: {job.job_id}: {error}", file=sys.stderr)
                codes.append(error.exit_code)
    return max(codes)


def resubmit(store: Store, job: Job, exclude: Sequence[str] = (), retries: int = 0) -> str:
    """Submit a Slurm job once more, not on these nodes; gives the new job's id."""
    run = RunDir.open(Path(job.run_dir))
    config, submission = run.read_config(), read_submission(run)
    wishes = build(SlurmWishes, submission.wishes, "submission.json") if submission else SlurmWishes()
    avoided = [node for node in (wishes.exclude, *exclude) if node]
    request = JobRequest(
        config=config,
        environment=_with_secrets(config.environment),
        wishes=replace(wishes, exclude=",".join(dict.fromkeys(avoided)) or None),
        retry_of=job.job_id,
        attempt=job.attempt + 1,
        retries=retries,
    )
    (sent,) = submit_jobs([request], cluster_here(), install_root(os.environ), store, on_sent=lambda sent: None)
    if sent.error is not None:
        raise sent.error
    return sent.job_id


def _run_here(job: Job, exclude: Sequence[str]) -> int:
    if exclude:
        raise ConfigError("--exclude-node has no effect on a local run; leave it out")
    config = RunDir.open(Path(job.run_dir)).read_config()
    return run_again(config, _with_secrets(config.environment), retry_of=job.job_id, attempt=job.attempt + 1)


def _ended(job: Job) -> Job:
    if job.going:
        raise ConfigError(f"job {job.job_id} is {job.status}; cancel it first: llmb-run jobs cancel {job.job_id}")
    if job.launcher not in ("local", "slurm"):
        raise ConfigError(f"job {job.job_id} was run elsewhere; submit it anew: llmb-run submit --help")
    return job


def _with_secrets(environment: dict[str, str]) -> dict[str, str]:
    """Run folders hold no secrets: those come from the environment of whoever tries again."""
    missing = [name for name, value in environment.items() if value == MASK and name not in os.environ]
    if missing:
        raise ConfigError(f"the run had {missing[0]} set, which no file holds; set it again: export {missing[0]}=...")
    return {name: os.environ[name] if value == MASK else value for name, value in environment.items()}
