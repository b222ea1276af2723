"""`llmb-run jobs log`: the output of a run; -f follows it until the run ends, wherever it runs."""

import argparse
import sys
import time
from io import TextIOWrapper
from pathlib import Path

from llmb.cli.jobs.jobs import open_store, stored_job
from llmb.cli.jobs.polling import Poller
from llmb.errors import ConfigError
from llmb.formats.dense_reader import BLOCK_BYTES, open_dense, start_of_stored
from llmb.launch.run_files.pid_file import is_alive
from llmb.launch.run_folder import RunFolder
from llmb.results.job_store import Job, Store

POLL_LOG_S = 0.2
POLL_SLURM_S = 5.0
MOST_TAIL_BYTES = 2**26  # of which lines are printed


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
            _PrintedLog(log_path(folder, job)).print_tail(options.tail)
    return 0


def log_path(folder: RunFolder, job: Job) -> Path:
    """Return the run's own log, or while it has none, Slurm's output file of the job."""
    output = folder.slurm_output(job.slurm_id) if job.slurm_id else None
    return output if output is not None and output.exists() and not folder.log.exists() else folder.log


class _PrintedLog:
    """A log of any size, printed from some place on, without its holes."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0

    def print_tail(self, tail: int) -> None:
        """Print the last lines."""
        try:
            with TextIOWrapper(open_dense(self.path), errors="replace") as log:
                log.buffer.seek(start_of_stored(log.fileno(), MOST_TAIL_BYTES))
                print("".join(log.readlines()[-tail:] if tail > 0 else []), end="", flush=True)
                self._offset = log.buffer.tell()
        except FileNotFoundError as error:
            reason = "the run ended before it wrote a log, or has not started"
            raise ConfigError(f"{self.path} does not exist; {reason}") from error
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from error

    def print_new(self) -> None:
        """Print what was written since."""
        with TextIOWrapper(open_dense(self.path), errors="replace") as log:
            log.buffer.seek(self._offset)
            while text := log.read(BLOCK_BYTES):
                print(text, end="", flush=True)
            self._offset = log.buffer.tell()


def _follow(run: "_FollowedRun", tail: int) -> None:
    """Print until the run ends. A job gets its own log some time after it starts, and another one when requeued."""
    while not run.log.exists() and run.is_active():
        time.sleep(POLL_LOG_S)
    log = _PrintedLog(run.log)
    log.print_tail(tail)
    while True:
        active = run.is_active()  # before reading: whatever is written until then gets printed
        log.print_new()
        if run.log != log.path:
            log = _PrintedLog(run.log)
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
