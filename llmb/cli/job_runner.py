"""The steward of a Slurm job: job.sh becomes this process, which runs the ranks and leaves a result, as a local run is
run.

    python -m llmb.cli.job_runner RUNDIR [FLAG FOR SRUN...]        on the first node of the allocation, never by hand

So a job's folder is complete though nobody watches. A job that Slurm starts again under its old id works in
RUNDIR/restart-<n>; one that somebody made of an old job.sh by hand has another id, and gets a run folder of its own.
One that is over by what llmb-run has told its user does not run again: a controller that crashed may have forgotten
its end.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from llmb.cli.llmb_run import guarded
from llmb.cli.stored_runs import keep_result, load_run
from llmb.config.serialization import to_json, write_whole
from llmb.config.spec import RunConfig
from llmb.errors import LlmbError
from llmb.events import Event, RunEnded
from llmb.launch.command import engine_order
from llmb.launch.event_tail import last_word, record_end
from llmb.launch.interruptions import Interruptions
from llmb.launch.local import Outcome, run_local
from llmb.launch.run_folder import RunDir
from llmb.launch.slurm.srun import END, WARNING, check_room, ranks_command, rendezvous, srun
from llmb.launch.slurm.submission import read_submission
from llmb.report.serving_overview import overview
from llmb.report.summary import summary
from llmb.results.result import Result

RESERVE_S = 60.0  # of an allocation's time, for ending and the result


def main(arguments: Sequence[str]) -> int:
    """One job, from its folder to its result; the exit code is what Slurm will call it."""
    return guarded(lambda: attend(RunDir.open(Path(arguments[0])), arguments[1:], os.environ), verbose=False)


def attend(run: RunDir, container: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the ranks of this folder's configuration, whatever comes, and write down how it went."""
    if is_over(run, environ):
        return _refuse(run, environ)
    config = run.read_config()
    with Interruptions((WARNING, END)):  # none may cut the result off; while ranks run, run_local has them
        run = own_folder(run, config, environ)
        try:
            run_in_allocation(config, run, {}, _nobody, container, environ)
        except LlmbError as error:
            _record_failure(run, str(error))
            print(f"ERROR: {error}", file=sys.stderr)
        result = keep_result(run, config)
        _say(run, config, result)
    return _exit_code(result)


def is_over(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Whether somebody has seen this job end, or found that there was none."""
    return run.ending.exists() and run.job_id in (None, environ["SLURM_JOB_ID"])


def _refuse(run: RunDir, environ: Mapping[str, str]) -> int:
    """As it ended before, so that Slurm's word on it stays the same."""
    submission = read_submission(run)
    name = (submission.name if submission else None) or environ["SLURM_JOB_ID"]
    _, result = load_run(run)
    print(
        f"ERROR: job {name} is over: {result.status}; to have it run again: llmb-run jobs retry {name}", file=sys.stderr
    )
    return _exit_code(result)


def _exit_code(result: Result) -> int:
    return 0 if result.status == "ok" else 2


def run_in_allocation(
    config: RunConfig,
    run: RunDir,
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    container: Sequence[str],
    environ: Mapping[str, str],
) -> Outcome:
    """As run_local, with ranks on all nodes of the allocation that this process is in."""
    _note_allocation(run, environ)
    check_room(config, environ)
    python = "python3" if container else sys.executable  # a container has its own, with its own torch
    order = engine_order(config, run, python, environ)
    order.lay_out(run)
    flags = [*container, f"--container-workdir={run.work}"] if container else []  # of this start, not of the first
    command = ranks_command(config, order, environ, flags)
    settings = {**environment, **_threads(environ), **rendezvous(environ)}
    launcher = srun(run.slurm_output(environ["SLURM_JOB_ID"]))
    return run_local(config, run, command, settings, on_event, _time_limit(config, environ), launcher=launcher)


def own_folder(run: RunDir, config: RunConfig, environ: Mapping[str, str]) -> RunDir:
    """Where this start of this job works. Its record is written here if its submitter was killed before he could."""
    job_id, known = environ["SLURM_JOB_ID"], run.job_id
    if known is not None and known != job_id:
        run = RunDir.create(run.install, config, datetime.now())
    if not run.record(job_id).exists():
        run.write_record(config, job_id, "slurm", **_cluster(environ))
    return run.for_new_start()


def _cluster(environ: Mapping[str, str]) -> dict[str, str | None]:
    return {
        "cluster_name": environ.get("SLURM_CLUSTER_NAME"),
        "slurm_account": environ.get("SLURM_JOB_ACCOUNT"),
        "slurm_gpu_partition": environ.get("SLURM_JOB_PARTITION"),
    }


def _note_allocation(run: RunDir, environ: Mapping[str, str]) -> None:
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    facts = {
        "job_id": environ.get("SLURM_JOB_ID"),
        "cluster": environ.get("SLURM_CLUSTER_NAME"),
        "partition": environ.get("SLURM_JOB_PARTITION"),
        "nodes": environ.get("SLURM_JOB_NODELIST"),
        "started_at": time.time(),
        "restarts": int(restarts) if restarts.isdigit() else 0,
    }
    write_whole(run.allocation, to_json(facts) + "\n")


def _threads(environ: Mapping[str, str]) -> dict[str, str]:
    """As many as a rank has cores, where the job says."""
    cores = environ.get("SLURM_CPUS_PER_TASK")
    return {"OMP_NUM_THREADS": cores} if cores and "OMP_NUM_THREADS" not in environ else {}


def _time_limit(config: RunConfig, environ: Mapping[str, str]) -> float:
    """The run's own; less where the allocation, which may be a user's, ends before."""
    limit, end = float(config.limits.time_limit_s), environ.get("SLURM_JOB_END_TIME", "")
    return min(limit, max(1.0, float(end) - time.time() - RESERVE_S)) if end.isdigit() else limit


def _record_failure(run: RunDir, reason: str) -> None:
    """What kept the run from beginning, unless the run itself has said how it ended."""
    path = run.events(0)
    if last_word(path) is None:
        record_end(path, RunEnded(time=time.time(), status="failed", reason=reason))


def _say(run: RunDir, config: RunConfig, result: Result) -> None:
    block = overview(result, config)
    if block and config.engine == "native":  # another engine has printed its own
        run.add_to_log(block)
    print(f"{summary(result)}\n\nrun folder: {run.path}")


def _nobody(event: Event) -> None:
    """Events are in their files; nobody looks on."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
