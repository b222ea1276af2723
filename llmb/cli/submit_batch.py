"""Sends runs to Slurm, hundreds in one pass, so that whenever this process is killed no job is lost.

    submit_jobs([JobRequest(config=..., environment=..., wishes=...)], cluster, root, store, on_sent)

Each job has its run folder with config.json, job.sh and submission.json, then its row in the store, before sbatch is
called; its id goes into the folder and the row after. Whoever finds a row still "submitting" asks Slurm for a job with
the token that submission.json holds. Several sbatch run at once, as each mostly waits.
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
from llmb.launch.command import check_engine, engine_environment, engine_order
from llmb.launch.engines.containers import check_image, find_container, srun_flags
from llmb.launch.run_folder import RunDir, mark_alive
from llmb.launch.secrets import mask
from llmb.launch.slurm import slurm_jobs
from llmb.launch.slurm.cluster_config import Cluster
from llmb.launch.slurm.job_script import SlurmWishes, job_options, placed, sbatch_arguments, slurm_script
from llmb.launch.slurm.srun import asked_per_node
from llmb.launch.slurm.submission import Submission, keep_name, keep_submission, new_token
from llmb.results.job_store import Store

AT_ONCE = 8  # sbatch
PORTION = 16  # jobs prepared and entered into the store together
STEWARD = "llmb.cli.job_runner"
# sbatch would hear these more than job.sh, which has what they ask for already, or must not have it.
UNHEARD = tuple(
    f"SBATCH_{name}"
    for name in ("TIMELIMIT", "SEGMENT_SIZE", "SIGNAL", "EXPORT", "OUTPUT", "ERROR", "INPUT", "OPEN_MODE", "COMMENT",
                 "JOB_NAME", "ARRAY_INX", "WAIT", "DEBUG")
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One run for Slurm."""

    config: RunConfig  # its nodes are those of the cluster: see for_cluster
    environment: dict[str, str] = field(default_factory=dict)  # for the ranks, with real values
    wishes: SlurmWishes = field(default_factory=SlurmWishes)
    retry_of: str | None = None  # the job whose configuration this one runs again
    attempt: int = 1
    retries: int = 0


@dataclass(frozen=True)
class Sent:
    """What became of a request; without an error it has the job's id in the store."""

    request: JobRequest
    run: RunDir
    job_id: str
    error: LlmbError | None = None


@dataclass(frozen=True)
class _Ready:
    """All that sbatch needs."""

    request: JobRequest
    run: RunDir
    arguments: list[str]
    environment: dict[str, str]
    temporary: str = ""


def for_cluster(config: RunConfig, cluster: Cluster | None) -> RunConfig:
    """The run on this cluster's nodes, or a ConfigError where it cannot be started there."""
    own = _own(config, cluster)
    container = find_container(own, os.environ)
    check_engine(config, os.environ, here=False, in_container=container is not None)
    check_image(container)
    return placed(config, asked_per_node(os.environ) or (own.gpus_per_node if own else None))


def script_for(request: JobRequest, run: RunDir, cluster: Cluster | None) -> str:
    """job.sh of a request in this folder."""
    config, settings = request.config, rank_settings(request.config, request.environment, cluster)
    exported = engine_environment(config, os.environ, settings)
    command = [sys.executable, "-m", STEWARD, str(run.path), *container_flags(config, run, exported, cluster)]
    kept = {name: value for name, value in exported.items() if name in settings or name == "PYTHONPATH"}
    return slurm_script(config, run, cluster, request.wishes, command, kept)


def rank_settings(config: RunConfig, environment: Mapping[str, str], cluster: Cluster | None) -> dict[str, str]:
    """What is set for the ranks: by the cluster's file, and over it by the user."""
    own = _own(config, cluster)
    return {**(own.environment if own else {}), **environment}


def container_flags(config: RunConfig, run: RunDir, settings: Mapping[str, str], cluster: Cluster | None) -> list[str]:
    """What srun is told about the container that ranks run in; nothing without one."""
    environ = {**os.environ, **settings}
    order = engine_order(config, run, sys.executable, environ)
    return srun_flags(find_container(_own(config, cluster), environ), order, run, run.install, settings)


def _own(config: RunConfig, cluster: Cluster | None) -> Cluster | None:
    """The cluster as this run's workload sees it."""
    return cluster.for_target(f"{config.target}_{config.size}") if cluster else None


def submit_jobs(
    requests: Sequence[JobRequest],
    cluster: Cluster | None,
    root: Path,
    store: Store,
    on_sent: Callable[[Sent], None],
) -> list[Sent]:
    """Submit all; `on_sent` hears of each as soon as it is known. On Ctrl-C no further one is sent.

    The folders of some are made while the sbatch of others run.
    """
    for request in {id(request): request for request in requests}.values():
        job_options(request.config, RunDir(root), cluster, request.wishes)  # a wrong wish, before anything is made
    sent: list[Sent] = []
    under_way: dict[Future[str], _Ready] = {}

    def note(futures: Iterable[Future[str]]) -> None:
        for one in _note(store, cluster, [(under_way.pop(future), future) for future in futures]):
            sent.append(one)
            on_sent(one)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for first in range(0, len(requests), PORTION):
                ready = _enter(store, [_prepare(one, cluster, root) for one in requests[first : first + PORTION]])
                under_way |= {pool.submit(_send, one): one for one in ready}
                note([future for future in under_way if future.done()])
            while under_way:
                note(wait(under_way, return_when=FIRST_COMPLETED).done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            _note(store, cluster, [(one, future) for future, one in under_way.items()])
            raise
    return sent


def _prepare(request: JobRequest, cluster: Cluster | None, root: Path) -> _Ready:
    """The run folder with all that the job reads."""
    config = replace(request.config, environment=mask(request.environment))
    request = replace(request, config=config)
    run = RunDir.create(root, config, datetime.now())
    mark_alive(run, os.getpid())
    run.write_job_script(script_for(request, run, cluster))
    submission = Submission(
        token=new_token(),
        retry_of=request.retry_of,
        attempt=request.attempt,
        retries=request.retries,
        wishes=to_plain(request.wishes),
    )
    keep_submission(run, submission)
    arguments = [*sbatch_arguments(config, run, cluster, request.wishes), f"--comment={submission.token}"]
    settings = rank_settings(config, request.environment, cluster)
    return _Ready(request, run, arguments, _sbatch_environment(settings))


def _sbatch_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """All that the job inherits, secrets too."""
    return {name: value for name, value in {**os.environ, **settings}.items() if name not in UNHEARD}


def _enter(store: Store, ready: Sequence[_Ready]) -> list[_Ready]:
    """Into the store, all at once."""
    with store.many():
        return [
            replace(
                one,
                temporary=store.add(
                    one.request.config,
                    one.run.path,
                    "slurm",
                    status="submitting",
                    retry_of=one.request.retry_of,
                    attempt=one.request.attempt,
                    retries=one.request.retries,
                ),
            )
            for one in ready
        ]


def _send(one: _Ready) -> str:
    return slurm_jobs.submit(one.run.job_script, one.arguments, one.environment)


def _note(store: Store, cluster: Cluster | None, done: Sequence[tuple[_Ready, "Future[str]"]]) -> list[Sent]:
    """Each job's id into its folder, then into its row. While nobody knows whether there is a job, the row stays."""
    outcomes = [(one, _outcome(future)) for one, future in done]
    for one, outcome in outcomes:
        if isinstance(outcome, str):
            one.run.write_record(one.request.config, outcome, "slurm", **cluster_facts(cluster))
        elif not isinstance(outcome, slurm_jobs.SlurmDown):
            _settle(one, str(outcome))
    with store.many():
        return [_entered(store, one, outcome) for one, outcome in outcomes]


def _settle(one: _Ready, reason: str) -> None:
    from llmb.cli.jobs.slurm_ending import settle_unsubmitted  # slow, and hardly ever needed

    settle_unsubmitted(one.run, one.request.config, reason)


def _outcome(future: "Future[str]") -> str | LlmbError:
    """The job's id, or why there is none."""
    if future.cancelled():
        return LaunchError("interrupted before it was submitted")
    try:
        return future.result()
    except LlmbError as error:
        return error


def _entered(store: Store, one: _Ready, outcome: str | LlmbError) -> Sent:
    if isinstance(outcome, str):
        name = store.submitted(one.temporary, outcome)
        keep_name(one.run, outcome, name)
        return Sent(one.request, one.run, name)
    if not isinstance(outcome, slurm_jobs.SlurmDown):
        store.refused(one.temporary, str(outcome))
    return Sent(one.request, one.run, one.temporary, outcome)


def cluster_facts(cluster: Cluster | None) -> dict[str, str | None]:
    """What a job's record says of where it was sent."""
    if cluster is None:
        return {}
    return {
        "cluster_name": cluster.name,
        "slurm_account": cluster.sbatch.get("account"),
        "slurm_gpu_partition": cluster.sbatch.get("partition"),
        "slurm_cpu_partition": cluster.cpu_sbatch.get("partition"),
    }
