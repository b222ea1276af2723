"""Runs an engine on this machine, shows its events as they come, and names how it ended, however it ended.

    run_local(config, rundir, command, environment, on_event, timeout_s) -> Outcome("ok", None, 0, 12.3)

A timeout, Ctrl-C, SIGTERM or SIGHUP ends the engine: SIGTERM, a grace time in which it may record its end, SIGKILL. A
second Ctrl-C kills at once. leash.py sees to it that no process is left behind, even by a kill -9 of this one.

The last RunEnded in events.rank0.jsonl is the run's end: where the verdict reached here says something else than the
engine did (a timeout which the engine took for an interruption), it is appended.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from llmb.errors import LaunchError
from llmb.events import Event, RunEnded
from llmb.launch import leash
from llmb.launch.command import engine_environment, job_script
from llmb.launch.interruptions import Interruptions
from llmb.launch.rundir import RunDir, mark_alive, shown
from llmb.launch.tail import EventTail, record_end
from llmb.launch.verdict import Verdict, finished, stopped
from llmb.spec import RunConfig, Status

POLL_S = 0.1
GRACE_S = 10.0
LOG_END = 2**18  # bytes searched for the cause of a silent death


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Status
    reason: str | None
    exit_code: int | None  # negative: killed by that signal
    seconds: float
    interrupted: int | None = None  # the signal that asked llmb-run to end: nothing more should be started


def run_local(
    config: RunConfig,
    rundir: RunDir,
    command: Sequence[str],
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    timeout_s: float,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run `command` in its run folder until it ends. `environment`: what the user adds to this process's own."""
    settings = engine_environment(config, os.environ, environment)
    rundir.write_job_script(job_script(command, settings, rundir))
    began = time.monotonic()
    tail = EventTail(rundir.events(0))
    stop: Verdict | None = None
    before_stop: RunEnded | None = None
    interrupted: int | None = None
    with Interruptions() as interruptions, _Engine(rundir, command, settings, grace_s) as engine:
        mark_alive(rundir, engine.pid)
        while engine.runs(POLL_S):
            _deliver(tail, on_event)
            interruption = interruptions.pop()
            interrupted = interrupted or interruption
            if stop is not None:
                if interruption == signal.SIGINT:
                    engine.say(leash.KILL)
                continue
            if interruption is not None:
                stop = Verdict("incomplete", f"interrupted by {signal.Signals(interruption).name}")
            elif time.monotonic() - began > timeout_s:
                stop = Verdict("timeout", f"stopped after the time limit of {timeout_s:g} s")
            if stop is not None:
                before_stop = tail.ended
                engine.say(leash.STOP)
    interrupted = interrupted or interruptions.pop()
    seconds = time.monotonic() - began
    _deliver(tail, on_event, finished=True)
    if engine.error is not None:
        verdict = Verdict("failed", engine.error)
    elif stop is not None:
        verdict = stopped(stop, before_stop, engine.exit_code, tail.ended)
    else:
        verdict = finished(engine.exit_code, _last_words(rundir), _log_end(rundir))
    if tail.ended is None or verdict != (tail.ended.status, tail.ended.reason):
        _record(tail, verdict)
        _deliver(tail, on_event, finished=True)
    if engine.error is not None:
        raise LaunchError(engine.error)
    return Outcome(verdict.status, verdict.reason, engine.exit_code, seconds, interrupted)


class _Engine:
    """This end of the leash: starts it, speaks to it, and reads its report when all is over."""

    exit_code: int | None = None
    error: str | None = None  # what kept the engine from running, or its log from being written

    def __init__(self, rundir: RunDir, command: Sequence[str], settings: Mapping[str, str], grace_s: float):
        order = {"command": list(command), "environment": {**os.environ, **settings}, "grace_s": grace_s}
        self._order = json.dumps(order).encode()
        self._report = b""
        path = {"PYTHONPATH": settings["PYTHONPATH"]} if "PYTHONPATH" in settings else {}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", leash.__name__, str(rundir.path)],
                env={**os.environ, **path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches llmb-run alone
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {sys.executable}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "_Engine":
        self.say(leash.envelope(self._order))
        return self

    def runs(self, wait_s: float) -> bool:
        """Whether it still does, after a wait that its end cuts short."""
        output = self._output()
        if not select.select([output], [], [], wait_s)[0]:
            return True
        chunk = os.read(output, 65536)
        self._report += chunk
        return bool(chunk)

    def say(self, words: bytes) -> None:
        """To the leash, if it still listens."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            while words:
                words = words[self._process.stdin.write(words) :]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # should this be an error's way out, the leash now ends the engine
        while self.runs(POLL_S):
            pass
        with suppress(ProcessLookupError):  # only had the leash itself been killed would there be anyone left
            os.killpg(self.pid, signal.SIGKILL)
        self._process.stdout.close()
        self._process.wait()
        self._read_report()

    def _read_report(self) -> None:
        last = self._report.decode(errors="replace").strip().rpartition("\n")[2]
        try:
            report = json.loads(last or "{}")
            self.exit_code, self.error = report.get("exit_code"), report.get("error")
        except (ValueError, AttributeError):
            self.error = f"the engine could not be watched: {last}"

    def _output(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()


def _deliver(tail: EventTail, on_event: Callable[[Event], None], finished: bool = False) -> None:
    for event in tail.new(finished=finished):
        on_event(event)


def _record(tail: EventTail, verdict: Verdict) -> None:
    try:
        record_end(tail.path, verdict.status, verdict.reason)
    except OSError as error:
        raise LaunchError(f"cannot write {shown(tail.path)}: {error.strerror}") from error


def _last_words(rundir: RunDir) -> list[RunEnded]:
    """How each rank says it ended, those that say so."""
    tails = [EventTail(path) for path in rundir.all_events()]
    for tail in tails:
        tail.new(finished=True)
    return [tail.ended for tail in tails if tail.ended is not None]


def _log_end(rundir: RunDir) -> str:
    try:
        with rundir.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_END))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
