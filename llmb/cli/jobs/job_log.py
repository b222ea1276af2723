"""`llmb-run jobs log`: the output of a run; -f follows it until the run ends, wherever it runs."""

import argparse
import sys
import time
from pathlib import Path

from llmb.cli.jobs.jobs import open_store, stored_job
from llmb.cli.jobs.polling import Poller
from llmb.errors import ConfigError
from llmb.launch.run_files.pid_file import is_alive
from llmb.launch.run_folder import RunFolder
from llmb.results.job_store import Job, Store

POLL_LOG_S = 0.2
POLL_SLURM_S = 5.0


def run(options: argparse.Namespace) -> int:
    """Print the tail of a log, or its path."""
    with open_store() as store:
        job = stored_job(store, options.job_id)
        folder = RunFolder.open(Path(job.run_dir))
        if options.path or options.dir:
            print(log_path(folder, job) if options.path else folder.path)
        elif options.list:
            print("\n".join(sorted(str(p.relative_to(folder.path)) for p in folder.path.rglob("*"))))
        elif options.follow:
            _follow(_FollowedRun(store, job), options.tail)
        else:
            _print_tail(log_path(folder, job), options.tail)
    return 0


def log_path(folder: RunFolder, job: Job) -> Path:
    """Return the run's own log, or while it has none, Slurm's output file of the job."""
    output = folder.slurm_output(job.slurm_id) if job.slurm_id else None
    return output if output is not None and output.exists() and not folder.log.exists() else folder.log


def _print_tail(path: Path, tail: int) -> int:
    """Print the last lines; return the offset of their end."""
    try:
        with path.open(errors="replace") as log:
            print("".join(log.readlines()[-tail:] if tail > 0 else []), end="", flush=True)
            return log.tell()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; the run ended before it wrote a log, or has not started") from error


def _follow(run: "_FollowedRun", tail: int) -> None:
    """Print until the run ends. A job gets its own log some time after it starts, and another one when requeued."""
    while not run.log.exists() and run.is_active():
        time.sleep(POLL_LOG_S)
    path = run.log
    offset = _print_tail(path, tail)
    while True:
        active = run.is_active()  # before reading: whatever is written until then gets printed
        with path.open(errors="replace") as log:
            log.seek(offset)
            print(log.read(), end="", flush=True)
            offset = log.tell()
        if run.log != path:
            path, offset = run.log, 0
        elif not active:
            return
        time.sleep(POLL_LOG_S)


class _FollowedRun:
    """Run that may be active: a local one by its process, a Slurm job by its state, polled now and then."""

    def __init__(self, store: Store, job: Job):
        self._job = job
        self._poller = Poller(store)
        self._next_poll_at = 0.0
        self._last_message = ""

    @property
    def log(self) -> Path:
        return log_path(RunFolder.open(Path(self._job.run_dir)), self._job)

    def is_active(self) -> bool:
        if self._job.launcher == "local":
            return is_alive(RunFolder.open(Path(self._job.run_dir))) is True
        if self._job.going and time.monotonic() >= self._next_poll_at:
            (self._job,) = self._poller.refresh([self._job])
            self._next_poll_at = time.monotonic() + POLL_SLURM_S
            self._print_pending_reason()
        return self._job.going

    def _print_pending_reason(self) -> None:
        """Print why a job is pending, once for each reason; it prints nothing itself."""
        reason = f" ({self._job.reason})" if self._job.reason else ""
        message = f"job {self._job.job_id} is {self._job.status}{reason}" if self._job.status == "pending" else ""
        if message and message != self._last_message:
            print(message, file=sys.stderr, flush=True)
        self._last_message = message
