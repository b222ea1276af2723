"""Submission of runs to Slurm, hundreds in one pass; no job is lost whenever this process is killed.

    submit_jobs([JobRequest(config=..., environment=..., sbatch_overrides=...)], cluster, root, store, on_sent)

Each job has its run folder with config.json, job.sh and submission.json, then its row in the store, before sbatch is
called; its id is added to folder and row afterwards. A row found still "submitting" is resolved by asking Slurm for the
token in submission.json. Several sbatch run concurrently, as each mostly waits.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig
from llmb.errors import LaunchError, LlmbError
from llmb.launch.command import build_launch_spec, check_engine, engine_environment
from llmb.launch.engines.containers import check_image, find_container, pyxis_options
from llmb.launch.run_files.pid_file import write_pid_file
from llmb.launch.run_folder import RunFolder
from llmb.launch.secrets import mask
from llmb.launch.slurm import slurm_jobs
from llmb.launch.slurm.cluster_config import Cluster
from llmb.launch.slurm.job_script import (
    SbatchOverrides,
    job_options,
    sbatch_arguments,
    slurm_script,
    with_gpus_per_node,
)
from llmb.launch.slurm.srun import gpus_per_node_override
from llmb.launch.slurm.submission import Submission, new_token, record_job_name, write_submission
from llmb.perfmodel.explain.run_prediction import with_prediction
from llmb.results.job_store import Store

MAX_CONCURRENT_SBATCH = 8  # sbatch
BATCH_SIZE = 16  # jobs prepared and entered into the store together
JOB_RUNNER = "llmb.cli.job_runner"
# These would override job.sh, which already has their settings or must not have them.
IGNORED_VARIABLES = tuple(
    f"SBATCH_{name}"
    for name in ("TIMELIMIT", "SEGMENT_SIZE", "SIGNAL", "EXPORT", "OUTPUT", "ERROR", "INPUT", "OPEN_MODE", "COMMENT",
                 "JOB_NAME", "ARRAY_INX", "WAIT", "DEBUG")
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One run to submit."""

    config: RunConfig  # its nodes are those of the cluster: see for_cluster
    environment: dict[str, str] = field(default_factory=dict)  # for the ranks, with real values
    sbatch_overrides: SbatchOverrides = field(default_factory=SbatchOverrides)
    retry_of: str | None = None  # the job that this one retries
    attempt: int = 1
    retries: int = 0
    force: bool = False  # start on nodes with too little memory too
    report: bool = True  # write report.html when the job ends


@dataclass(frozen=True)
class Sent:
    """Outcome of a request: the job's id in the store, or an error."""

    request: JobRequest
    run: RunFolder
    job_id: str
    error: LlmbError | None = None


@dataclass(frozen=True)
class _PreparedJob:
    """Input of one sbatch call."""

    request: JobRequest
    run: RunFolder
    arguments: list[str]
    environment: dict[str, str]
    temporary: str = ""


def for_cluster(config: RunConfig, cluster: Cluster | None) -> RunConfig:
    """Adapt a run to the cluster's nodes, or raise ConfigError if it cannot start there."""
    matching = _matching_cluster(config, cluster)
    container = find_container(matching, os.environ)
    check_engine(config, os.environ, local=False, in_container=container is not None)
    check_image(container)
    return with_gpus_per_node(
        config, gpus_per_node_override(os.environ) or (matching.gpus_per_node if matching else None)
    )


def script_for(request: JobRequest, run: RunFolder, cluster: Cluster | None) -> str:
    """Return job.sh of a request."""
    config, settings = request.config, rank_settings(request.config, request.environment, cluster)
    exported = engine_environment(config, os.environ, settings)
    command = [sys.executable, "-m", JOB_RUNNER, str(run.path), *container_flags(config, run, exported, cluster)]
    job_exports = {name: value for name, value in exported.items() if name in settings or name == "PYTHONPATH"}
    return slurm_script(config, run, cluster, request.sbatch_overrides, command, job_exports)


def rank_settings(config: RunConfig, environment: Mapping[str, str], cluster: Cluster | None) -> dict[str, str]:
    """Return environment variables of the ranks: the cluster's, overridden by the user's."""
    matching = _matching_cluster(config, cluster)
    return {**(matching.environment if matching else {}), **environment}


def container_flags(
    config: RunConfig, run: RunFolder, settings: Mapping[str, str], cluster: Cluster | None
) -> list[str]:
    """Return srun's container options; empty without a container."""
    environ = {**os.environ, **settings}
    spec = build_launch_spec(config, run, sys.executable, environ)
    return pyxis_options(find_container(_matching_cluster(config, cluster), environ), spec, run, run.install, settings)


def _matching_cluster(config: RunConfig, cluster: Cluster | None) -> Cluster | None:
    """Return the cluster with the settings of this run's workload applied."""
    return cluster.for_target(f"{config.target}_{config.size}") if cluster else None


def submit_jobs(
    requests: Sequence[JobRequest],
    cluster: Cluster | None,
    root: Path,
    store: Store,
    on_sent: Callable[[Sent], None],
) -> list[Sent]:
    """Submit all jobs; call `on_sent` with each outcome. On Ctrl-C no further job is submitted.

    Folders are prepared while the sbatch of earlier jobs run.
    """
    for request in {id(request): request for request in requests}.values():
        job_options(
            request.config, RunFolder(root), cluster, request.sbatch_overrides
        )  # refuse wrong options before anything is created
    sent: list[Sent] = []
    pending: dict[Future[str], _PreparedJob] = {}

    def record(futures: Iterable[Future[str]]) -> None:
        for job in _record_submissions(store, cluster, [(pending.pop(future), future) for future in futures]):
            sent.append(job)
            on_sent(job)

    with ThreadPoolExecutor(MAX_CONCURRENT_SBATCH) as pool:
        try:
            for first in range(0, len(requests), BATCH_SIZE):
                prepared = _add_to_store(
                    store, [_prepare(job, cluster, root) for job in requests[first : first + BATCH_SIZE]]
                )
                pending |= {pool.submit(_call_sbatch, job): job for job in prepared}
                record([future for future in pending if future.done()])
            while pending:
                record(wait(pending, return_when=FIRST_COMPLETED).done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            _record_submissions(store, cluster, [(job, future) for future, job in pending.items()])
            raise
    return sent


def _prepare(request: JobRequest, cluster: Cluster | None, root: Path) -> _PreparedJob:
    """Create the run folder with everything the job reads."""
    config = with_prediction(replace(request.config, environment=mask(request.environment)), root)
    request = replace(request, config=config)
    run = RunFolder.create(root, config, datetime.now())
    run.write_command_line(sys.argv, os.environ)
    write_pid_file(run, os.getpid())
    run.write_job_script(script_for(request, run, cluster), private=bool(request.environment))
    submission = Submission(
        token=new_token(),
        retry_of=request.retry_of,
        attempt=request.attempt,
        retries=request.retries,
        force=request.force,
        report=request.report,
        sbatch_overrides=to_plain(request.sbatch_overrides),
    )
    write_submission(run, submission)
    arguments = [*sbatch_arguments(config, run, cluster, request.sbatch_overrides), f"--comment={submission.token}"]
    settings = rank_settings(config, request.environment, cluster)
    return _PreparedJob(request, run, arguments, _sbatch_environment(settings))


def _sbatch_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that the job inherits, secrets included."""
    return {name: value for name, value in {**os.environ, **settings}.items() if name not in IGNORED_VARIABLES}


def _add_to_store(store: Store, prepared: Sequence[_PreparedJob]) -> list[_PreparedJob]:
    """Add jobs to the store in one transaction."""
    with store.many():
        return [
            replace(
                job,
                temporary=store.add(
                    job.request.config,
                    job.run.path,
                    "slurm",
                    status="submitting",
                    retry_of=job.request.retry_of,
                    attempt=job.request.attempt,
                    retries=job.request.retries,
                ),
            )
            for job in prepared
        ]


def _call_sbatch(job: _PreparedJob) -> str:
    return slurm_jobs.submit(job.run.job_script, job.arguments, job.environment)


def _record_submissions(
    store: Store, cluster: Cluster | None, done: Sequence[tuple[_PreparedJob, "Future[str]"]]
) -> list[Sent]:
    """Record each job's id in its folder, then in its row; the row stays while it is unknown whether a job exists."""
    outcomes = [(job, _outcome(future)) for job, future in done]
    for job, outcome in outcomes:
        if isinstance(outcome, str):
            job.run.write_record(job.request.config, outcome, "slurm", **cluster_facts(cluster))
        elif not isinstance(outcome, slurm_jobs.SlurmUnavailable):
            _settle(job, str(outcome))
    with store.many():
        sent = [_record_outcome(store, job, outcome) for job, outcome in outcomes]
    for accepted in (outcome for outcome in sent if outcome.error is None):
        accepted.run.add_short_path(accepted.job_id)
    return sent


def _settle(job: _PreparedJob, reason: str) -> None:
    from llmb.cli.jobs.job_outcome import record_unsubmitted  # slow to import and rarely needed

    record_unsubmitted(job.run, job.request.config, reason)


def _outcome(future: "Future[str]") -> str | LlmbError:
    """Return the job's id, or the error."""
    if future.cancelled():
        return LaunchError("interrupted before it was submitted")
    try:
        return future.result()
    except LlmbError as error:
        return error


def _record_outcome(store: Store, job: _PreparedJob, outcome: str | LlmbError) -> Sent:
    if isinstance(outcome, str):
        name = store.submitted(job.temporary, outcome)
        record_job_name(job.run, outcome, name)
        return Sent(job.request, job.run, name)
    if isinstance(outcome, slurm_jobs.SlurmUnavailable):
        store.note(job.temporary, reason=str(outcome))  # said again if no job is found once Slurm responds
    else:
        store.refused(job.temporary, str(outcome))
    return Sent(job.request, job.run, job.temporary, outcome)


def cluster_facts(cluster: Cluster | None) -> dict[str, str | None]:
    """Return the cluster fields of a job's record."""
    if cluster is None:
        return {}
    return {
        "cluster_name": cluster.name,
        "slurm_account": cluster.sbatch.get("account"),
        "slurm_gpu_partition": cluster.sbatch.get("partition"),
        "slurm_cpu_partition": cluster.cpu_sbatch.get("partition"),
    }
