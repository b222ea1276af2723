"""Supervisor of an engine: the process between llmb-run and the engine, so that neither can outlive the other.

    python -m llmb.launch.supervisor RUN_FOLDER RESTART  started by local.py, never by hand

stdin:  a request {command, environment, grace_s, launcher_signal}, then `s` to stop the run or `k` to kill it. End
        of file means that llmb-run is gone, even by kill -9: the kernel closes its end of the pipe. (A parent-death
        signal would not end an engine that hangs in a CUDA call; here SIGTERM is followed by SIGKILL after the grace
        period.)
stdout: one JSON line {exit_code, error}.

It is a subreaper: orphans of the engine become its children, even in another process group or session, as torchrun's
workers are. It exits when it has no child left, so no process of a run outlives it. It copies the engine's output to
the log, in whole lines without secrets, and continues to do so when llmb-run is gone.

A launcher such as srun, whose ranks are on other machines, kills them on SIGTERM. So it first gets `launcher_signal`,
which it forwards and on which ranks exit, after the grace period SIGTERM, and after another SIGKILL.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from llmb.events import RunEnded
from llmb.launch.engine_log import EngineLog
from llmb.launch.event_tail import append_run_end, read_run_end
from llmb.launch.procfs import descendants
from llmb.launch.run_folder import RunFolder, printable_path
from llmb.launch.secrets import secret_values

POLL_S = 0.05
PR_SET_CHILD_SUBREAPER = 36
STOP, KILL = b"s", b"k"


class Supervisor:
    """Supervises the engine and all its descendants, from its start until none is left."""

    def __init__(
        self, engine: subprocess.Popen[bytes], log: EngineLog, grace_s: float, launcher_signal: int | None = None
    ):
        self.exit_code: int | None = None
        self.abandoned = False  # llmb-run is gone
        self._engine = engine
        self._log = log
        self._grace_s = grace_s
        self._launcher_signal = launcher_signal
        self._terminate_at: float | None = None  # a launcher; set when stopping has begun
        self._kill_at: float | None = None  # set when stopping has begun
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def supervise(self) -> None:
        """Log the engine's output and follow llmb-run's commands until no process is left."""
        assert self._engine.stdout is not None
        output, commands = self._engine.stdout.fileno(), sys.stdin.fileno()
        watched = {output, commands}
        while True:
            children_left = self._reap()
            ready, _, _ = select.select(watched, [], [], POLL_S if children_left else 0)
            if output in ready and not self._log.copy_from(output):
                watched.remove(output)
            if commands in ready and not self._handle(os.read(commands, 64)):
                watched.remove(commands)
            if not children_left and output not in ready:
                return
            if self.exit_code is not None or self._log.error:
                self.stop()
            now = time.monotonic()
            if self._terminate_at is not None and now >= self._terminate_at:
                self._terminate_at = None
                self._signal_launcher(signal.SIGTERM)
            if self._kill_at is not None and now >= self._kill_at:
                self._kill()

    def stop(self) -> None:
        """Send SIGTERM now, SIGKILL after the grace period.

        SIGTERM goes to the engine's process group, and to direct children outside of it: torchrun forwards it to its
        workers itself, which must not get it twice.
        """
        if self._kill_at is not None:
            return
        self._kill_at = time.monotonic() + self._grace_s
        if self._launcher_signal is not None:
            self._terminate_at, self._kill_at = self._kill_at, self._kill_at + self._grace_s
            self._signal_launcher(self._launcher_signal)
            return
        me, group = os.getpid(), os.getpgrp()
        outside = [p.pid for p in descendants(me) if p.parent == me and p.group != group]
        os.killpg(group, signal.SIGTERM)  # this process too, which has already begun to stop
        for pid in outside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _signal_launcher(self, number: int) -> None:
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self._engine.pid, number)

    def _kill(self) -> None:
        """Kill all descendants; called repeatedly, as new ones may be forked meanwhile."""
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _handle(self, commands: bytes) -> bool:
        """Follow llmb-run's commands; False at the end of the pipe."""
        if KILL in commands:
            self.stop()
            self._kill_at = time.monotonic()
            self._terminate_at = None
            self._signal_launcher(signal.SIGTERM)
        self.abandoned = self.abandoned or not commands
        self.stop()
        return bool(commands)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def _reap(self) -> bool:
        """Reap zombies; return whether any child is left."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._engine.pid:
                    self.exit_code = self._engine.returncode = os.waitstatus_to_exitcode(status)
        return False


def main() -> None:
    """Supervise one run, from the request on stdin to the report on stdout."""
    run_folder = RunFolder(Path(sys.argv[1]), int(sys.argv[2]))
    request = json.loads(_read_request(sys.stdin.fileno()))
    exit_code, error = run(run_folder, **request)
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps({"exit_code": exit_code, "error": error}).encode())


def run(
    run_folder: RunFolder,
    command: list[str],
    environment: dict[str, str],
    grace_s: float,
    launcher_signal: int | None = None,
) -> tuple[int | None, str | None]:
    """Run the engine; return its exit code (negative: a signal), and an error outside of it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        log = EngineLog(run_folder.log, secret_values(environment))
    except OSError as error:
        return None, f"cannot write {printable_path(run_folder.log)}: {error.strerror}"
    try:
        engine = subprocess.Popen(
            command,
            env=environment,
            cwd=run_folder.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return None, f"cannot start {command[0]}: {error.strerror}"
    supervisor = Supervisor(engine, log, grace_s, launcher_signal)
    supervisor.supervise()
    if supervisor.abandoned:
        _record_abandoned(run_folder)
    return supervisor.exit_code, f"cannot write {printable_path(log.path)}: {log.error.strerror}" if log.error else None


def _record_abandoned(run_folder: RunFolder) -> None:
    """Append the RunEnded of a run whose llmb-run is gone, unless the engine wrote one."""
    path = run_folder.events(0)
    if read_run_end(path) is None:
        with suppress(OSError):
            reason = "llmb-run ended before the run did"
            append_run_end(path, RunEnded(time=time.time(), status="incomplete", reason=reason))


def frame_request(request: bytes) -> bytes:
    """Prefix a request with its length."""
    return f"{len(request):08d}".encode() + request


def _read_request(descriptor: int) -> bytes:
    """Read the request and not a byte more: the commands that follow are for `supervise`."""
    return _read_exactly(descriptor, int(_read_exactly(descriptor, 8)))


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            sys.exit("llmb-run exited before it sent a request")
        data += chunk
    return data


if __name__ == "__main__":
    main()
