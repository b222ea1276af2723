"""Detects that a run hangs, and finds the rank that caused it.

    detector = HangDetector(config, engine)  # engine.request_hang_reports(pids): they write a HangReport
    detector.observe(event)                  # every event of every rank
    detector.verdict() -> Verdict("failed", "hung: no rank made progress for 30 s after step 4; rank 2 ...", 2) or None

A step may take ten times the median, and at least half a minute. Slow phases get ten minutes: the start, a checkpoint,
a trace, the end. But where the work is done on CPUs, processes that use no CPU time are not slow: after some 40 s the
run hangs, whatever its phase. `stall_limit_s` replaces the first rule and the last; the second never gives less.

When the limit is exceeded every rank is asked for a HangReport. The culprit is the rank that does not respond, or has
entered fewer collectives than those that wait for it.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from llmb.config.spec import Inference, RunConfig, Training
from llmb.events import Event, GpuSample, HangReport, RunStarted, StepDone
from llmb.launch.verdict import Verdict

MIN_LIMIT_S = 30.0  # with the time for reports and shutdown well below a minute
PAUSE_LIMIT_S = 600.0
STEP_FACTOR = 10  # times the median of recent steps
RECENT_STEPS = 20
IDLE_LIMIT_S = 40.0
IDLE_CORE_FRACTION = 0.05  # of one core, for all processes together: torchrun and sleeping threads poll now and then
CPU_SAMPLE_S = 2.0  # between two samples of the CPU time
REPORT_TIMEOUT_S = 3.0


class WatchedEngine(Protocol):
    """Engine that a HangDetector watches."""

    def request_hang_reports(self, pids: Collection[int]) -> None:
        """Ask those of these processes that belong to the engine for a HangReport."""

    def cpu_time_s(self) -> float | None:
        """Return the CPU time of all its processes so far; None: they are on other machines."""


class HangDetector:
    """Progress of one run."""

    def __init__(self, config: RunConfig, engine: WatchedEngine, clock: Callable[[], float] = time.monotonic):
        self._config = config
        self._engine = engine
        self._clock = clock
        self._progress_at = self._busy_at = self._sampled_at = clock()
        self._cpu_time_s = 0.0
        self._requested_at: float | None = None
        self._pids: dict[int, int] = {}  # by rank
        self._reports: dict[int, HangReport] = {}
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._step: int | None = None

    def observe(self, event: Event) -> None:
        """Record an event: anything but a HangReport or a sample of the GPU is progress."""
        if isinstance(event, HangReport):
            self._reports[event.rank] = event
            return
        if isinstance(event, GpuSample):  # its thread goes on while the rank hangs
            return
        self._progress_at, self._requested_at = self._clock(), None
        if isinstance(event, RunStarted) and event.pid is not None:
            self._pids[event.rank] = event.pid
        elif isinstance(event, StepDone):
            self._step = max(self._step or 0, event.step)
            if event.seconds is not None:
                self._step_seconds.append(event.seconds)

    @property
    def limit_s(self) -> float | None:
        """Seconds that may pass without an event; None: no limit for this kind of run."""
        if self._config.engine != "native":  # it writes no events, so their absence means nothing
            return None
        configured = self._config.limits.stall_limit_s
        if isinstance(self._config.workload, Inference):
            return configured
        if self._step is None or pause_follows(self._config, self._step):
            return max(PAUSE_LIMIT_S, configured or 0.0)
        return (
            configured
            if configured is not None
            else max(MIN_LIMIT_S, STEP_FACTOR * median(self._step_seconds or [0.0]))
        )

    def verdict(self) -> Verdict | None:
        """Return why the run must be stopped, if it hangs; the ranks are asked for reports first."""
        now = self._clock()
        if not self._hangs(now):
            return None
        if self._requested_at is None:
            self._requested_at, self._reports = now, {}
            self._engine.request_hang_reports(self._pids.values())
        if now - self._requested_at < REPORT_TIMEOUT_S and self._reports.keys() < self._pids.keys():
            return None
        cause = find_hang_cause(self._reports, self._pids.keys())
        last_step = "before the first step ended" if self._step is None else f"after step {self._step}"
        seconds = self._requested_at - self._progress_at
        reason = f"hung: no rank made progress for {seconds:.0f} s {last_step}; {cause.evidence}"
        return Verdict("failed", reason, cause.rank)

    def _hangs(self, now: float) -> bool:
        if self._requested_at is not None:  # the CPU time of writing reports must not count as work
            return True
        limit = self.limit_s
        return (limit is not None and now - self._progress_at >= limit) or self._is_idle(now)

    def _is_client(self) -> bool:
        """Return whether the work is done by a server elsewhere, for which the run may wait idly."""
        return self._config.engine == "openai"

    def _is_idle(self, now: float) -> bool:
        """Return whether a CPU run used no CPU time for long; with GPUs the host may sleep while they compute."""
        on_gpu = self._config.launch_machine.gpu != "cpu"
        if on_gpu or self._config.limits.stall_limit_s is not None or self._is_client():
            return False
        if now - self._sampled_at >= CPU_SAMPLE_S:
            cpu_time_s = self._engine.cpu_time_s()
            if cpu_time_s is None:
                return False
            if abs(cpu_time_s - self._cpu_time_s) > IDLE_CORE_FRACTION * (now - self._sampled_at):
                self._busy_at = now
            self._sampled_at, self._cpu_time_s = now, cpu_time_s
        return now - max(self._busy_at, self._progress_at) >= IDLE_LIMIT_S


def pause_follows(config: RunConfig, step: int) -> bool:
    """Return whether more than the next step follows this one: a checkpoint, a trace, the end."""
    work, profile = config.workload, config.profile
    if isinstance(work, Inference) or step >= work.steps:
        return True
    if isinstance(work, Training) and work.checkpoint_every and step % work.checkpoint_every == 0:
        return True
    return profile.profile and profile.profile_start - 1 <= step < profile.profile_stop


@dataclass(frozen=True)
class HangCause:
    """Rank that blocks the others, and the evidence."""

    rank: int | None
    evidence: str


def find_hang_cause(reports: Mapping[int, HangReport], ranks: Collection[int]) -> HangCause:
    """Return the strongest evidence against as few of the ranks as possible."""
    not_waiting = {rank for rank, report in reports.items() if not report.waiting}
    if silent := set(ranks) - reports.keys():
        return _blame(silent, "did not respond: stopped, or busy inside a library")
    if behind := ranks_behind(reports) & not_waiting:
        return _blame(behind, "has not entered the collective in which others wait")
    if not_waiting and (len(not_waiting) < len(reports) or len(reports) == 1):
        return _blame(not_waiting, "does not wait for any other")
    return HangCause(None, "all ranks have entered the same collectives" if reports else "no rank could be reached")


def _blame(ranks: set[int], evidence: str) -> HangCause:
    first, *remaining = sorted(ranks)
    also = f" (as ranks {', '.join(map(str, remaining))})" if remaining else ""
    return HangCause(first, f"rank {first} {evidence}{also}")


def ranks_behind(reports: Mapping[int, HangReport]) -> set[int]:
    """Return the ranks that are behind others in some process group, and ahead of no rank that is itself behind."""
    groups: dict[str, dict[int, int]] = {}
    for rank, report in reports.items():
        for group, entered in report.collectives.items():
            groups.setdefault(group, {})[rank] = entered
    awaited: dict[int, set[int]] = {rank: set() for rank in reports}
    for counts in groups.values():
        for rank, entered in counts.items():
            awaited[rank] |= {late for late, count in counts.items() if count < entered}
    behind = set().union(*awaited.values())
    return {rank for rank in behind if not awaited[rank]} or behind
