"""Runs an engine on this machine, shows its events as they come, and names how it ended, however it ended.

    run_local(config, rundir, command, environment, on_event, timeout_s) -> Outcome("ok", None, 0, 12.3)

A timeout, Ctrl-C, SIGTERM or SIGHUP ends the engine: SIGTERM, a grace time in which it may record its end, SIGKILL. A
second Ctrl-C kills at once. leash.py sees to it that no process is left behind, even by a kill -9 of this one.

Inside a Slurm job the command is srun, and the ranks it starts are on other machines: see Launcher.

A run that no longer moves is ended too (`hang_detector.py`). The last RunEnded in events.rank0.jsonl is the run's end: where
the verdict reached here says more than rank 0 did (a timeout which the engine took for an interruption, whose fault a
failure was), it is appended.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from llmb.config.spec import RunConfig, Status
from llmb.errors import LaunchError
from llmb.events import WHERE_SIGNAL, Event, RunEnded
from llmb.launch import supervisor
from llmb.launch.command import engine_environment, job_script
from llmb.launch.engine_log import end_of
from llmb.launch.event_tail import EventTails, record_end
from llmb.launch.hang_detector import StallWatch
from llmb.launch.interruptions import Interruptions
from llmb.launch.procfs import descendants
from llmb.launch.run_folder import RunDir, mark_alive, shown
from llmb.launch.verdict import Verdict, exit_codes, finished, last_lines, stopped

POLL_S = 0.1
GRACE_S = 10.0


@dataclass(frozen=True)
class Launcher:
    """A command that starts ranks on other machines, passes signals on to them, and kills them when it is ended."""

    stop_signal: int  # that ranks end by
    signals: Collection[int]  # by which the scheduler ends this process
    meaning: Callable[[int], Verdict]  # of one of these, at the moment it has come


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Status
    reason: str | None
    exit_code: int | None  # negative: killed by that signal; of several ranks, that of the first to fail
    seconds: float
    interrupted: int | None = None  # the signal that asked llmb-run to end: nothing more should be started
    guilty_rank: int | None = None  # whose fault it was; none: no rank's, or not known


def run_local(
    config: RunConfig,
    rundir: RunDir,
    command: Sequence[str],
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    timeout_s: float,
    grace_s: float = GRACE_S,
    launcher: Launcher | None = None,
) -> Outcome:
    """Run `command` in its run folder until it ends. `environment`: what the user adds to this process's own.

    `launcher`: what `command` is, where it is not the engine itself; there the job script is somebody else's.
    """
    settings = engine_environment(config, os.environ, environment)
    if launcher is None:
        rundir.write_job_script(job_script(command, settings, rundir))
    began = time.monotonic()
    tails = EventTails(rundir)
    stop: Verdict | None = None
    before_stop: list[RunEnded] = []
    interrupted: int | None = None
    with (
        Interruptions(launcher.signals if launcher else ()) as interruptions,
        _Engine(rundir, command, settings, grace_s, launcher) as engine,
    ):
        mark_alive(rundir, engine.pid)
        watch = StallWatch(config, engine)
        while engine.runs(POLL_S):
            _deliver(tails, on_event, watch)
            interruption = interruptions.pop()
            interrupted = interrupted or interruption
            if stop is not None:
                if interruption == signal.SIGINT:
                    engine.say(supervisor.KILL)
                continue
            if interruption is not None:
                stop = _interrupted(interruption, launcher)
            elif time.monotonic() - began > timeout_s:
                stop = Verdict("timeout", f"stopped after the time limit of {timeout_s:g} s")
            else:
                stop = watch.verdict()
            if stop is not None:
                before_stop = tails.ends
                engine.say(supervisor.STOP)
    if (late := interruptions.pop()) is not None:
        interrupted = interrupted or late
        if stop is None and launcher is not None and late in launcher.signals:
            stop = launcher.meaning(late)  # a scheduler ends the ranks along with this process: they were quicker
    seconds = time.monotonic() - began
    _deliver(tails, on_event, finished=True)
    own = next((end for end in tails.ends if end.rank == 0), None)
    log = end_of(rundir.log)
    if engine.error is not None:
        verdict = Verdict("failed", engine.error)
    elif stop is not None:
        verdict = stopped(stop, before_stop, engine.exit_code, own)
    else:
        verdict = finished(engine.exit_code, tails.ends, log, tails.silent, alone=config.machine.gpus == 1)
    lines = [] if verdict.guilty_rank is None else last_lines(verdict.guilty_rank, log)
    if own is None or lines or verdict != (own.status, own.reason, own.guilty_rank):
        _record(rundir, RunEnded(time=time.time(), **verdict._asdict(), last_lines=tuple(lines)))
        _deliver(tails, on_event, finished=True)
    if engine.error is not None:
        raise LaunchError(engine.error)
    exit_code = next(iter(exit_codes(log).values()), engine.exit_code)  # torchrun itself says 1, whatever happened
    return Outcome(verdict.status, verdict.reason, exit_code, seconds, interrupted, verdict.guilty_rank)


def _interrupted(number: int, launcher: Launcher | None) -> Verdict:
    if launcher is not None and number in launcher.signals:
        return launcher.meaning(number)
    return Verdict("incomplete", f"interrupted by {signal.Signals(number).name}")


class _Engine:
    """This end of the leash: starts it, speaks to it, and reads its report when all is over."""

    exit_code: int | None = None
    error: str | None = None  # what kept the engine from running, or its log from being written

    def __init__(
        self,
        rundir: RunDir,
        command: Sequence[str],
        settings: Mapping[str, str],
        grace_s: float,
        launcher: Launcher | None = None,
    ):
        order = {"command": list(command), "environment": {**os.environ, **settings}, "grace_s": grace_s}
        self._launches = launcher is not None
        if launcher is not None:
            order["launcher_signal"] = int(launcher.stop_signal)
        self._order = json.dumps(order).encode()
        self._report = b""
        path = {"PYTHONPATH": settings["PYTHONPATH"]} if "PYTHONPATH" in settings else {}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", supervisor.__name__, str(rundir.path), str(rundir.restart)],
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
        self.say(supervisor.envelope(self._order))
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
        """To the supervisor, if it still listens."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            while words:
                words = words[self._process.stdin.write(words) :]

    def worked_s(self) -> float | None:
        """CPU time of all its processes so far; none: they are on other machines."""
        return None if self._launches else sum(process.worked_s for process in descendants(self.pid))

    def ask_where(self, pids: Collection[int]) -> None:
        """Ask those of these processes that are the engine's for their Whereabouts; a launcher passes it on to all."""
        for process in descendants(self.pid):
            if process.parent == self.pid if self._launches else process.pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, WHERE_SIGNAL)

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


def _deliver(
    tails: EventTails, on_event: Callable[[Event], None], watch: StallWatch | None = None, finished: bool = False
) -> None:
    """Rank 0's events to whoever wants them, everyone's to the watch."""
    for rank, event in tails.new(finished=finished):
        if watch is not None:
            watch.saw(event)
        if rank == 0:
            on_event(event)


def _record(rundir: RunDir, end: RunEnded) -> None:
    path = rundir.events(0)
    try:
        record_end(path, end)
    except OSError as error:
        raise LaunchError(f"cannot write {shown(path)}: {error.strerror}") from error
