"""Holds an engine on a leash: the process between llmb-run and the engine, so that neither can leave the other behind.

    python -m llmb.launch.supervisor RUNDIR RESTART  started by local.py, never by hand

stdin:  an order {command, environment, grace_s, launcher_signal}, then `s` to stop the run or `k` to kill it. End of
        file means that llmb-run is gone, be it by kill -9: the kernel closes its end of the pipe. (A parent-death
        signal would not end an engine that hangs in a CUDA call; here SIGTERM is followed by SIGKILL after the grace
        time.)
stdout: one JSON line {exit_code, error}.

It is a subreaper: whatever the engine's processes leave behind becomes its child, be it in another group or session, as
torchrun's workers are. It ends when it has no child left, so nothing of a run outlives it. The engine's output goes
through it into the log, in whole lines without secrets, and goes on doing so when llmb-run is gone.

A launcher such as srun, whose ranks are on other machines, kills them on SIGTERM. So it is given `launcher_signal`,
which it passes on and ranks end by, then after the grace time SIGTERM, and is itself killed after another.
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
from llmb.launch.engine_log import Log
from llmb.launch.event_tail import last_word, record_end
from llmb.launch.procfs import descendants
from llmb.launch.run_folder import RunDir, shown
from llmb.launch.secrets import secret_values

POLL_S = 0.05
PR_SET_CHILD_SUBREAPER = 36
STOP, KILL = b"s", b"k"


class Leash:
    """The engine with all that stems from it, from its start until nothing of it is left."""

    def __init__(self, engine: subprocess.Popen[bytes], log: Log, grace_s: float, launcher_signal: int | None = None):
        self.exit_code: int | None = None
        self.abandoned = False  # llmb-run went away
        self._engine = engine
        self._log = log
        self._grace_s = grace_s
        self._launcher_signal = launcher_signal
        self._terminate_at: float | None = None  # a launcher; set when the end has begun
        self._kill_at: float | None = None  # set when the end has begun
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def hold(self) -> None:
        """Log the engine's output and obey llmb-run until no process is left."""
        assert self._engine.stdout is not None
        output, words = self._engine.stdout.fileno(), sys.stdin.fileno()
        watched = {output, words}
        while True:
            some_left = self._reap()
            ready, _, _ = select.select(watched, [], [], POLL_S if some_left else 0)
            if output in ready and not self._log.take(output):
                watched.remove(output)
            if words in ready and not self._obey(os.read(words, 64)):
                watched.remove(words)
            if not some_left and output not in ready:
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
        """SIGTERM now, SIGKILL after the grace time.

        It goes to the engine's group, and to those outside of it who have nobody but this process to tell them:
        torchrun tells its workers itself, and twice would be once too often.
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
        os.killpg(group, signal.SIGTERM)  # this process too, which has begun to stop already
        for pid in outside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _signal_launcher(self, number: int) -> None:
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self._engine.pid, number)

    def _kill(self) -> None:
        """Repeated until none is left, as a process may have been born meanwhile."""
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _obey(self, words: bytes) -> bool:
        """Do as llmb-run says; False when it says no more."""
        if KILL in words:
            self.stop()
            self._kill_at = time.monotonic()
            self._terminate_at = None
            self._signal_launcher(signal.SIGTERM)
        self.abandoned = self.abandoned or not words
        self.stop()
        return bool(words)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def _reap(self) -> bool:
        """Collect the dead; whether any child is left."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._engine.pid:
                    self.exit_code = self._engine.returncode = os.waitstatus_to_exitcode(status)
        return False


def main() -> None:
    """One run, from its order to its report."""
    rundir = RunDir(Path(sys.argv[1]), int(sys.argv[2]))
    order = json.loads(_read_order(sys.stdin.fileno()))
    exit_code, error = run(rundir, **order)
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps({"exit_code": exit_code, "error": error}).encode())


def run(
    rundir: RunDir,
    command: list[str],
    environment: dict[str, str],
    grace_s: float,
    launcher_signal: int | None = None,
) -> tuple[int | None, str | None]:
    """The engine's exit code (negative: a signal), and what went wrong outside of it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        log = Log(rundir.log, secret_values(environment))
    except OSError as error:
        return None, f"cannot write {shown(rundir.log)}: {error.strerror}"
    try:
        engine = subprocess.Popen(
            command,
            env=environment,
            cwd=rundir.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return None, f"cannot start {command[0]}: {error.strerror}"
    leash = Leash(engine, log, grace_s, launcher_signal)
    leash.hold()
    if leash.abandoned:
        _record_abandoned(rundir)
    return leash.exit_code, f"cannot write {shown(log.path)}: {log.error.strerror}" if log.error else None


def _record_abandoned(rundir: RunDir) -> None:
    """The last word on a run that nobody watches any more, where the engine did not say it."""
    path = rundir.events(0)
    if last_word(path) is None:
        with suppress(OSError):
            reason = "llmb-run ended before the run did"
            record_end(path, RunEnded(time=time.time(), status="incomplete", reason=reason))


def envelope(order: bytes) -> bytes:
    """An order as it travels: its length, then itself."""
    return f"{len(order):08d}".encode() + order


def _read_order(descriptor: int) -> bytes:
    """The order and not a byte more: the words that follow are for `hold`."""
    return _exactly(descriptor, int(_exactly(descriptor, 8)))


def _exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            sys.exit("llmb-run went away before it gave an order")
        data += chunk
    return data


if __name__ == "__main__":
    main()
