"""Job runner of a Slurm job: job.sh becomes this process, which runs the ranks and leaves a result, like a local run.

    python -m llmb.cli.job_runner RUNDIR [FLAG FOR SRUN...]        on the first node of the allocation, never by hand

So a job's folder is complete without llmb-run watching. A requeued job works in RUNDIR/restart-<n>; an old job.sh
submitted again by hand has another id and gets a run folder of its own. A job that llmb-run has already reported as
ended does not run again: a controller that crashed may have forgotten its end.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from llmb.cli.llmb_run import guarded
from llmb.cli.memory_check import check_node_memory
from llmb.cli.report.page_writer import write_report
from llmb.cli.stored_runs import load_run, write_result
from llmb.config.serialization import to_json, write_atomic
from llmb.config.spec import RunConfig
from llmb.errors import LlmbError
from llmb.events import Event, RunEnded
from llmb.launch.command import build_launch_spec
from llmb.launch.event_tail import append_run_end, read_run_end
from llmb.launch.local import InterruptSignals, RunOutcome, run_local
from llmb.launch.restarts.restart_loop import run_with_restarts
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.srun import (
    END_SIGNAL,
    TIME_LIMIT_SIGNAL,
    check_allocation_size,
    rendezvous,
    srun_command,
    srun_launcher,
)
from llmb.launch.slurm.submission import read_submission
from llmb.report.serving_overview import overview
from llmb.report.summary import summary
from llmb.results.result import Result

RESERVE_S = 60.0  # of an allocation's time, for shutdown and the result


def main(arguments: Sequence[str]) -> int:
    """Run one job from its folder to its result; the exit code becomes Slurm's."""
    return guarded(lambda: run_job(RunFolder.open(Path(arguments[0])), arguments[1:], os.environ), verbose=False)


def run_job(run: RunFolder, container: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the ranks of this folder's configuration and record the outcome, whatever happens."""
    if has_ended_before(run, environ):
        return _refuse(run, environ)
    config = run.read_config()
    with InterruptSignals(
        (TIME_LIMIT_SIGNAL, END_SIGNAL)
    ):  # none may cut the result off; while ranks run, run_local has them
        run = job_folder(run, config, environ)
        submission = read_submission(run)
        try:
            check_node_memory(config, force=submission is not None and submission.force)
            run, _ = run_with_restarts(
                config, run, lambda this, run: run_in_allocation(this, run, {}, _ignore_event, container, environ)
            )
        except LlmbError as error:
            run = RunFolder.open(run.path)  # at its last start
            _record_failure(run, str(error))
            print(f"ERROR: {error}", file=sys.stderr)
        result = write_result(run, config)
        _print_result(run, config, result)
        if submission is None or submission.report:
            print(write_report(run))
    return _exit_code(result)


def has_ended_before(run: RunFolder, environ: Mapping[str, str]) -> bool:
    """Return whether this job was already recorded as ended or never submitted."""
    return run.job_outcome.exists() and run.job_id in (None, environ["SLURM_JOB_ID"])


def _refuse(run: RunFolder, environ: Mapping[str, str]) -> int:
    """Exit with the code of the earlier end, so that Slurm's state stays the same."""
    submission = read_submission(run)
    name = (submission.name if submission else None) or environ["SLURM_JOB_ID"]
    _, result = load_run(run)
    print(f"ERROR: job {name} has ended: {result.status}; to run it again: llmb-run jobs retry {name}", file=sys.stderr)
    return _exit_code(result)


def _exit_code(result: Result) -> int:
    return 0 if result.status == "ok" else 2


def run_in_allocation(
    config: RunConfig,
    run: RunFolder,
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    container: Sequence[str],
    environ: Mapping[str, str],
) -> RunOutcome:
    """Run as run_local does, with ranks on all nodes of this process's allocation."""
    _write_allocation(run, environ)
    check_allocation_size(config, environ)
    python = "python3" if container else sys.executable  # a container has its own Python and torch
    spec = build_launch_spec(config, run, python, environ)
    spec.write_files(run)
    flags = [*container, f"--container-workdir={run.work}"] if container else []  # of this start, not of the first
    command = srun_command(config, spec, environ, flags)
    settings = {**environment, **_threads(environ), **rendezvous(environ)}
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    launcher = srun_launcher(run.slurm_output(environ["SLURM_JOB_ID"]), host)
    return run_local(config, run, command, settings, on_event, _time_limit(config, environ), launcher=launcher)


def job_folder(run: RunFolder, config: RunConfig, environ: Mapping[str, str]) -> RunFolder:
    """Return the folder of this start of the job; write its record if the submitter was killed before it could."""
    job_id, recorded_id = environ["SLURM_JOB_ID"], run.job_id
    if recorded_id is not None and recorded_id != job_id:
        run = RunFolder.create(run.install, config, datetime.now())
    if not run.record(job_id).exists():
        run.write_record(config, job_id, "slurm", **_cluster(environ))
    return run.for_new_start()


def _cluster(environ: Mapping[str, str]) -> dict[str, str | None]:
    return {
        "cluster_name": environ.get("SLURM_CLUSTER_NAME"),
        "slurm_account": environ.get("SLURM_JOB_ACCOUNT"),
        "slurm_gpu_partition": environ.get("SLURM_JOB_PARTITION"),
    }


def _write_allocation(run: RunFolder, environ: Mapping[str, str]) -> None:
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    facts = {
        "job_id": environ.get("SLURM_JOB_ID"),
        "cluster": environ.get("SLURM_CLUSTER_NAME"),
        "partition": environ.get("SLURM_JOB_PARTITION"),
        "nodes": environ.get("SLURM_JOB_NODELIST"),
        "started_at": time.time(),
        "restarts": int(restarts) if restarts.isdigit() else 0,
    }
    write_atomic(run.allocation, to_json(facts) + "\n")


def _threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Return one OpenMP thread per core of a rank, if the job states its cores."""
    cores = environ.get("SLURM_CPUS_PER_TASK")
    return {"OMP_NUM_THREADS": cores} if cores and "OMP_NUM_THREADS" not in environ else {}


def _time_limit(config: RunConfig, environ: Mapping[str, str]) -> float:
    """Return the run's time limit, or less if the allocation ends before."""
    limit, end = float(config.limits.time_limit_s), environ.get("SLURM_JOB_END_TIME", "")
    return min(limit, max(1.0, float(end) - time.time() - RESERVE_S)) if end.isdigit() else limit


def _record_failure(run: RunFolder, reason: str) -> None:
    """Record why the run could not start, unless it recorded its own end."""
    path = run.events(0)
    if read_run_end(path) is None:
        append_run_end(path, RunEnded(time=time.time(), status="failed", reason=reason))


def _print_result(run: RunFolder, config: RunConfig, result: Result) -> None:
    block = overview(result, config)
    if block and config.engine == "native":  # another engine has printed its own
        run.add_to_log(block)
    print(f"{summary(result)}\n\nrun folder: {run.short_path}")


def _ignore_event(event: Event) -> None:
    """Ignore an event; it is in its file."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
