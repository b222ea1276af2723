"""Runs an engine on this machine, delivers its events as they are written, and determines the outcome of the run.

    run_local(config, run_folder, command, environment, on_event, timeout_s) -> RunOutcome("ok", None, 0, 12.3)

A timeout, Ctrl-C, SIGTERM or SIGHUP stops the engine: SIGTERM, a grace period in which it may record its end, SIGKILL.
A second Ctrl-C kills at once. supervisor.py ensures that no process is left behind, even by a kill -9 of this one.

Inside a Slurm job the command is srun, and the ranks it starts are on other machines: see Launcher.

A run that hangs is stopped too (hang_detector.py). The last RunEnded in events.rank0.jsonl is the outcome of the run:
where the verdict reached here says more than rank 0 did (a timeout which the engine took for an interruption, which
rank failed), it is appended.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from llmb.config.spec import RunConfig, Status
from llmb.errors import LaunchError
from llmb.events import HANG_REPORT_SIGNAL, Event, RunEnded
from llmb.launch import supervisor
from llmb.launch.command import engine_environment, job_script, python_path
from llmb.launch.engine_log import read_log_tail
from llmb.launch.event_tail import EventTails, append_run_end
from llmb.launch.hang_detector import HangDetector
from llmb.launch.memory_cgroup import oom_kills, peak_usage
from llmb.launch.procfs import descendants
from llmb.launch.run_files.pid_file import write_pid_file
from llmb.launch.run_folder import RunFolder, printable_path
from llmb.launch.verdict import Verdict, exit_codes, finished_run_verdict, last_lines, stopped_run_verdict

POLL_S = 0.1
GRACE_S = 10.0
INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptSignals:
    """Records SIGINT, SIGTERM and SIGHUP, and others on request, while entered. Those ignored by nohup stay ignored."""

    def __init__(self, more: Iterable[int] = ()) -> None:
        self._numbers = {*INTERRUPT_SIGNALS, *more}
        self._pending: list[int] = []
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "InterruptSignals":
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            for number in self._numbers:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous_handlers[number] = signal.signal(number, self._record)
        return self

    def pop(self) -> int | None:
        """Return the oldest signal not yet popped."""
        return self._pending.pop(0) if self._pending else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(number)


@dataclass(frozen=True)
class Launcher:
    """Command that starts ranks on other machines, forwards signals to them, and kills them when it is terminated."""

    stop_signal: int  # on which ranks exit
    signals: Collection[int]  # by which the scheduler ends this process
    verdict: Callable[[int], Verdict]  # for one of these, at the moment it arrives
    name: str  # with its host, as messages name it: srun on n1


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run."""

    status: Status
    reason: str | None
    exit_code: int | None  # negative: killed by that signal; of several ranks, that of the first to fail
    seconds: float
    interrupted: int | None = None  # the signal that asked llmb-run to exit: nothing more should be started
    failed_rank: int | None = None  # the culprit; None: no rank, or unknown


def run_local(
    config: RunConfig,
    run_folder: RunFolder,
    command: Sequence[str],
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    timeout_s: float,
    grace_s: float = GRACE_S,
    launcher: Launcher | None = None,
) -> RunOutcome:
    """Run `command` in its run folder until it ends. `environment`: what the user adds to os.environ.

    `launcher`: set where `command` is not the engine itself; the job script is then written by someone else.
    """
    settings = engine_environment(config, os.environ, environment)
    if launcher is None:
        run_folder.write_job_script(job_script(command, settings, run_folder), private=bool(environment))
    start = time.monotonic()
    tails = EventTails(run_folder)
    oom_kills_before = oom_kills()
    with (
        InterruptSignals(launcher.signals if launcher else ()) as signals,
        _Engine(run_folder, command, settings, grace_s, launcher) as engine,
    ):
        write_pid_file(run_folder, engine.pid)
        watch = _Watch(config, engine, tails, signals, launcher)
        watch.until_end(on_event, start + timeout_s, timeout_s)
    watch.take_late_signal()
    seconds = time.monotonic() - start
    _deliver(tails, on_event, finished=True)
    log = read_log_tail(run_folder.log)
    verdict = _verdict(config, engine, watch, tails, log, _oom_kills_since(oom_kills_before))
    rank0_end = tails.rank0_end
    lines = [] if verdict.failed_rank is None else last_lines(verdict.failed_rank, log)
    if rank0_end is None or lines or verdict != (rank0_end.status, rank0_end.reason, rank0_end.failed_rank):
        _append_end(run_folder, RunEnded(time=time.time(), **verdict._asdict(), last_lines=tuple(lines)))
        _deliver(tails, on_event, finished=True)
    if engine.error is not None:
        raise LaunchError(engine.error)
    exit_code = next(iter(exit_codes(log).values()), engine.exit_code)  # torchrun itself exits with 1 in every case
    return RunOutcome(verdict.status, verdict.reason, exit_code, seconds, watch.interrupted, verdict.failed_rank)


class _Watch:
    """Delivers the events of a running engine, and stops it after a signal, at its time limit or when it hangs."""

    stop: Verdict | None = None  # why it was stopped
    ends_before_stop: Sequence[RunEnded] = ()
    interrupted: int | None = None  # by which signal

    def __init__(
        self,
        config: RunConfig,
        engine: "_Engine",
        tails: EventTails,
        signals: InterruptSignals,
        launcher: Launcher | None,
    ):
        self._engine, self._tails, self._signals, self.launcher = engine, tails, signals, launcher
        self._detector = HangDetector(config, engine)

    def until_end(self, on_event: Callable[[Event], None], deadline: float, timeout_s: float) -> None:
        """Return when the engine has ended by itself or after its stop."""
        while self._engine.is_running(POLL_S):
            _deliver(self._tails, on_event, self._detector)
            number = self._signals.pop()
            self.interrupted = self.interrupted or number
            if self.stop is not None:
                if number == signal.SIGINT:
                    self._engine.send(supervisor.KILL)
                continue
            if number is not None:
                self.stop = _interrupt_verdict(number, self.launcher)
            elif time.monotonic() > deadline:
                self.stop = Verdict("timeout", f"stopped after the time limit of {timeout_s:g} s")
            else:
                self.stop = self._detector.verdict()
            if self.stop is not None:
                self.ends_before_stop = self._tails.ends
                self._engine.send(supervisor.STOP)

    def take_late_signal(self) -> None:
        """Take a signal that came while the engine ended: a scheduler signals ranks and this process alike."""
        number = self._signals.pop()
        self.interrupted = self.interrupted or number
        if number is not None and self.stop is None and self.launcher is not None and number in self.launcher.signals:
            self.stop = self.launcher.verdict(number)


def _verdict(
    config: RunConfig, engine: "_Engine", watch: _Watch, tails: EventTails, log: str, killed_for_memory: int
) -> Verdict:
    """Return how the run ended, from everything that is known of it."""
    if engine.error is not None:
        return Verdict("failed", engine.error)
    if watch.stop is not None:
        return stopped_run_verdict(watch.stop, watch.ends_before_stop, engine.exit_code, tails.rank0_end)
    return finished_run_verdict(
        engine.exit_code,
        tails.ends,
        log,
        tails.silent,
        single_rank=config.launch_machine.gpus == 1 or config.engine == "openai",
        oom_kills=killed_for_memory,
        memory=peak_usage(),
        launcher=watch.launcher.name if watch.launcher is not None else None,
    )


def _oom_kills_since(before: Mapping[str, int]) -> int:
    """Return how many processes the OOM killer has ended since these counts, by the counter that rose most."""
    return max((count - before.get(source, count) for source, count in oom_kills().items()), default=0)


def _interrupt_verdict(number: int, launcher: Launcher | None) -> Verdict:
    if launcher is not None and number in launcher.signals:
        return launcher.verdict(number)
    return Verdict("incomplete", f"interrupted by {signal.Signals(number).name}")


class _Engine:
    """Client of the supervisor: starts it, sends it commands, and reads its report at the end."""

    exit_code: int | None = None
    error: str | None = None  # what kept the engine from running, or its log from being written

    def __init__(
        self,
        run_folder: RunFolder,
        command: Sequence[str],
        settings: Mapping[str, str],
        grace_s: float,
        launcher: Launcher | None = None,
    ):
        request = {"command": list(command), "environment": {**os.environ, **settings}, "grace_s": grace_s}
        self._is_launcher = launcher is not None
        if launcher is not None:
            request["launcher_signal"] = int(launcher.stop_signal)
        self._request = json.dumps(request).encode()
        self._report = b""
        path = {"PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))}  # of this checkout, whatever the ranks use
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", supervisor.__name__, str(run_folder.path), str(run_folder.restart)],
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
        self.send(supervisor.frame_request(self._request))
        return self

    def is_running(self, wait_s: float) -> bool:
        """Return whether it still runs, after a wait that its exit cuts short."""
        output = self._output()
        if not select.select([output], [], [], wait_s)[0]:
            return True
        chunk = os.read(output, 65536)
        self._report += chunk
        return bool(chunk)

    def send(self, message: bytes) -> None:
        """Write to the supervisor, if it still reads."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            while message:
                message = message[self._process.stdin.write(message) :]

    def cpu_time_s(self) -> float | None:
        """Return the CPU time of all its processes so far; None: they are on other machines."""
        return None if self._is_launcher else sum(process.cpu_time_s for process in descendants(self.pid))

    def request_hang_reports(self, pids: Collection[int]) -> None:
        """Ask those of these processes that belong to the engine for a HangReport; a launcher forwards it to all."""
        for process in descendants(self.pid):
            if process.parent == self.pid if self._is_launcher else process.pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, HANG_REPORT_SIGNAL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # on an exception the supervisor now stops the engine
        while self.is_running(POLL_S):
            pass
        with suppress(ProcessLookupError):  # only if the supervisor itself was killed is anyone left
            os.killpg(self.pid, signal.SIGKILL)
        self._process.stdout.close()
        self._process.wait()
        self._read_report()

    def _read_report(self) -> None:
        last_line = self._report.decode(errors="replace").strip().rpartition("\n")[2]
        try:
            report = json.loads(last_line or "{}")
            self.exit_code, self.error = report.get("exit_code"), report.get("error")
        except (ValueError, AttributeError):
            self.error = f"the supervisor failed: {last_line}"

    def _output(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()


def _deliver(
    tails: EventTails, on_event: Callable[[Event], None], detector: HangDetector | None = None, finished: bool = False
) -> None:
    """Pass rank 0's events to the callback, and every rank's to the hang detector."""
    for rank, event in tails.new(finished=finished):
        if detector is not None:
            detector.observe(event)
        if rank == 0:
            on_event(event)


def _append_end(run_folder: RunFolder, end: RunEnded) -> None:
    path = run_folder.events(0)
    try:
        append_run_end(path, end)
    except OSError as error:
        raise LaunchError(f"cannot write {printable_path(path)}: {error.strerror}") from error
