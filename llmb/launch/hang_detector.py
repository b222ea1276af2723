"""Notices that a run no longer moves, and finds out whose fault it is.

    watch = StallWatch(config, engine)  # engine.ask_where(pids): makes those processes write their Whereabouts
    watch.saw(event)                    # every event of every rank
    watch.verdict() -> Verdict("failed", "hung: no rank made progress for 30 s after step 4; rank 2 ...", 2) or None

A step may take ten times as long as steps do, and never less than half a minute. What is slow by nature gets ten
minutes: the start, a checkpoint, a trace, the end. But where the work is done on CPUs, processes that use none are not
slow: after some 40 s the run hangs, whatever it is at. `stall_limit_s` stands in place of the first rule and the last;
the second never gives less.

When the time is up every rank is asked how far it has come, and whoever does not answer, or has entered fewer
collectives than those who wait for it, is the one.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from llmb.config.spec import Inference, RunConfig, Training
from llmb.events import Event, RunStarted, StepDone, Whereabouts
from llmb.launch.verdict import Verdict

SHORTEST_S = 30.0  # together with the time to answer and to end well below a minute
PAUSE_S = 600.0
TIMES = 10  # the median of recent steps
RECENT = 20  # steps
IDLE_S = 40.0
IDLE_SHARE = 0.05  # of one core, for all processes together: torchrun and sleeping threads look about now and then
SAMPLE_S = 2.0  # between two looks at the CPU time
ANSWER_S = 3.0


class Engine(Protocol):
    """What is watched."""

    def ask_where(self, pids: Collection[int]) -> None:
        """Ask those of these processes that are the engine's for their Whereabouts."""

    def worked_s(self) -> float | None:
        """CPU time of all its processes so far; none: they are on other machines."""


class StallWatch:
    """One run's progress."""

    def __init__(self, config: RunConfig, engine: Engine, clock: Callable[[], float] = time.monotonic):
        self._config = config
        self._engine = engine
        self._clock = clock
        self._moved_at = self._worked_at = self._sampled_at = clock()
        self._worked_s = 0.0
        self._asked_at: float | None = None
        self._pids: dict[int, int] = {}  # by rank
        self._answers: dict[int, Whereabouts] = {}
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._step: int | None = None

    def saw(self, event: Event) -> None:
        """An event has come: unless it is an answer, something still moves."""
        if isinstance(event, Whereabouts):
            self._answers[event.rank] = event
            return
        self._moved_at, self._asked_at = self._clock(), None
        if isinstance(event, RunStarted) and event.pid is not None:
            self._pids[event.rank] = event.pid
        elif isinstance(event, StepDone):
            self._step = max(self._step or 0, event.step)
            if event.seconds is not None:
                self._seconds.append(event.seconds)

    @property
    def limit_s(self) -> float | None:
        """Seconds that may pass without an event; none: nothing can be said about this kind of run."""
        if self._config.engine != "native":  # it writes no events, so their absence means nothing
            return None
        wanted = self._config.limits.stall_limit_s
        if isinstance(self._config.workload, Inference):
            return wanted
        if self._step is None or pause_follows(self._config, self._step):
            return max(PAUSE_S, wanted or 0.0)
        return wanted if wanted is not None else max(SHORTEST_S, TIMES * median(self._seconds or [0.0]))

    def verdict(self) -> Verdict | None:
        """Why the run must be ended, if it hangs; the ranks are asked first."""
        now = self._clock()
        if not self._stalled(now):
            return None
        if self._asked_at is None:
            self._asked_at, self._answers = now, {}
            self._engine.ask_where(self._pids.values())
        if now - self._asked_at < ANSWER_S and self._answers.keys() < self._pids.keys():
            return None
        suspicion = suspect(self._answers, self._pids.keys())
        after = "before the first step ended" if self._step is None else f"after step {self._step}"
        seconds = self._asked_at - self._moved_at
        reason = f"hung: no rank made progress for {seconds:.0f} s {after}; {suspicion.evidence}"
        return Verdict("failed", reason, suspicion.rank)

    def _stalled(self, now: float) -> bool:
        if self._asked_at is not None:  # what the answers cost must not look like work
            return True
        limit = self.limit_s
        return (limit is not None and now - self._moved_at >= limit) or self._idle(now)

    def _idle(self, now: float) -> bool:
        """Whether the engine has done nothing for long; only CPUs show it, a host may sleep while its GPU computes."""
        if self._config.machine.gpu != "cpu" or self._config.limits.stall_limit_s is not None:
            return False
        if now - self._sampled_at >= SAMPLE_S:
            worked_s = self._engine.worked_s()
            if worked_s is None:
                return False
            if abs(worked_s - self._worked_s) > IDLE_SHARE * (now - self._sampled_at):
                self._worked_at = now
            self._sampled_at, self._worked_s = now, worked_s
        return now - max(self._worked_at, self._moved_at) >= IDLE_S


def pause_follows(config: RunConfig, step: int) -> bool:
    """Whether more than the next step comes after this one: a checkpoint, a trace, the end."""
    work, profile = config.workload, config.profile
    if isinstance(work, Inference) or step >= work.steps:
        return True
    if isinstance(work, Training) and work.checkpoint_every and step % work.checkpoint_every == 0:
        return True
    return profile.profile and profile.profile_start - 1 <= step < profile.profile_stop


@dataclass(frozen=True)
class Suspicion:
    """Who holds the others up, and how that is known."""

    rank: int | None
    evidence: str


def suspect(answers: Mapping[int, Whereabouts], asked: Collection[int]) -> Suspicion:
    """The strongest evidence there is against as few ranks as possible."""
    free = {rank for rank, answer in answers.items() if not answer.waiting}
    if silent := set(asked) - answers.keys():
        return _against(silent, "did not answer: stopped, or busy inside a library")
    if last := last_of_all(answers) & free:
        return _against(last, "has not entered the collective in which others wait")
    if free and (len(free) < len(answers) or len(answers) == 1):
        return _against(free, "does not wait for any other")
    return Suspicion(None, "all ranks are at the same place" if answers else "no rank could be asked")


def _against(ranks: set[int], what: str) -> Suspicion:
    first, *others = sorted(ranks)
    also = f" (as ranks {', '.join(map(str, others))})" if others else ""
    return Suspicion(first, f"rank {first} {what}{also}")


def last_of_all(answers: Mapping[int, Whereabouts]) -> set[int]:
    """Ranks that others are ahead of in some group, and that are themselves ahead of none that is behind."""
    groups: dict[str, dict[int, int]] = {}
    for rank, answer in answers.items():
        for group, entered in answer.collectives.items():
            groups.setdefault(group, {})[rank] = entered
    awaited: dict[int, set[int]] = {rank: set() for rank in answers}
    for counts in groups.values():
        for rank, entered in counts.items():
            awaited[rank] |= {other for other, count in counts.items() if count < entered}
    behind = set().union(*awaited.values())
    return {rank for rank in behind if not awaited[rank]} or behind
