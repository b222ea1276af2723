"""`llmb-run jobs log`: what a run printed; -f goes on until it ends, wherever it runs."""

import argparse
import sys
import time
from pathlib import Path

from llmb.cli.jobs.jobs import open_store
from llmb.cli.jobs.polling import Poller
from llmb.errors import ConfigError
from llmb.launch.run_folder import RunDir, is_alive
from llmb.results.job_store import Job, Store

LOOK_S = 0.2
ASK_SLURM_S = 5.0


def run(options: argparse.Namespace) -> int:
    """The end of a log, or where it is."""
    with open_store() as store:
        job = store.job(options.job_id)
        folder = RunDir.open(Path(job.run_dir))
        if options.path or options.dir:
            print(log_of(folder, job) if options.path else folder.path)
        elif options.list:
            print("\n".join(sorted(str(p.relative_to(folder.path)) for p in folder.path.rglob("*"))))
        elif options.follow:
            _follow(_Followed(store, job), options.tail)
        else:
            _print_end(log_of(folder, job), options.tail)
    return 0


def log_of(folder: RunDir, job: Job) -> Path:
    """The run's own log; where it has none yet, what Slurm caught of the job."""
    caught = folder.slurm_output(job.slurm_id) if job.slurm_id else None
    return caught if caught is not None and caught.exists() and not folder.log.exists() else folder.log


def _print_end(path: Path, tail: int) -> int:
    """The last lines; gives where they end."""
    try:
        with path.open(errors="replace") as log:
            print("".join(log.readlines()[-tail:] if tail > 0 else []), end="", flush=True)
            return log.tell()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; the run ended, or has not come so far as to write it") from error


def _follow(run: "_Followed", tail: int) -> None:
    """Print until the run ends. A job has its own log some time after it starts, and another when it starts again."""
    while not run.log.exists() and run.goes_on():
        time.sleep(LOOK_S)
    path = run.log
    place = _print_end(path, tail)
    while True:
        goes_on = run.goes_on()  # asked before reading: what is written until then is printed
        with path.open(errors="replace") as log:
            log.seek(place)
            print(log.read(), end="", flush=True)
            place = log.tell()
        if run.log != path:
            path, place = run.log, 0
        elif not goes_on:
            return
        time.sleep(LOOK_S)


class _Followed:
    """A run that may go on: by its process where that can be seen, else by what Slurm says, asked now and then."""

    def __init__(self, store: Store, job: Job):
        self._job = job
        self._poller = Poller(store)
        self._ask_at = 0.0
        self._said = ""

    @property
    def log(self) -> Path:
        return log_of(RunDir.open(Path(self._job.run_dir)), self._job)

    def goes_on(self) -> bool:
        if self._job.launcher == "local":
            return is_alive(RunDir.open(Path(self._job.run_dir))) is True
        if self._job.going and time.monotonic() >= self._ask_at:
            (self._job,) = self._poller.refresh([self._job])
            self._ask_at = time.monotonic() + ASK_SLURM_S
            self._say_waiting()
        return self._job.going

    def _say_waiting(self) -> None:
        """A job in the queue prints nothing: say why, once for each reason."""
        why = f" ({self._job.reason})" if self._job.reason else ""
        waiting = f"job {self._job.job_id} is {self._job.status}{why}" if self._job.status == "pending" else ""
        if waiting and waiting != self._said:
            print(waiting, file=sys.stderr, flush=True)
        self._said = waiting
