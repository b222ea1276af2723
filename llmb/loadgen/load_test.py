"""One load on one server, from readiness to the last response. The public interface of the load generator.

    events = []
    outcome = run_load(LoadSettings(base_url=..., model=..., concurrency=32, num_requests=320), events.append)
    result = derive(load_config(settings), events)        # llmb.results.derive, llmb.config.load_settings

Every fact is an event, so that a run folder, a sweep and a test read the same. Nothing is retried; failed requests are
recorded. Ctrl-C ends the load and keeps what was measured.
"""

import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from llmb import __version__
from llmb.config.load_settings import LoadSettings, check_load
from llmb.config.spec import Status
from llmb.errors import ConfigError, LaunchError
from llmb.events import ClientFacts, Event, RequestDone, RunEnded, RunStarted, ServingFacts, ServingSample
from llmb.loadgen.calibration import Calibration, calibrate, choose_processes
from llmb.loadgen.client.request_body import ROUTES
from llmb.loadgen.event_loop import loop_name
from llmb.loadgen.load_worker import Record
from llmb.loadgen.readiness import PrefixCounters, prefix_counters, server_version, wait_ready
from llmb.loadgen.request_source import RequestSource
from llmb.loadgen.server_device import server_device
from llmb.loadgen.worker_pool import WorkerPool
from llmb.perfmodel.metrics import percentile

OnEvent = Callable[[Event], None]
HEAD_START_S = 0.2  # from the start command to the first request
DRAIN_S = 30.0  # for records to arrive after a stop
POLL_S = 0.05
# While a load runs, events take a tenth of the parent's time, as the client needs the cores; others follow at its end.
DELIVERY_S = 0.01
DELIVERY_INTERVAL_S = 0.1


@dataclass(frozen=True)
class LoadOutcome:
    """Outcome of a load."""

    status: Status
    reason: str | None = None
    interrupted: bool = False


def api_key_of(settings: LoadSettings) -> str | None:
    """Return the key from the environment, without white space around it; raise if its variable holds none."""
    return None if settings.api_key_env is None else read_api_key(settings.api_key_env)


def read_api_key(variable: str) -> str:
    """Return the API key in an environment variable; no message holds it, whatever is wrong with it."""
    key = os.environ.get(variable, "").strip()  # keys in files end in a line end
    if not key:
        raise ConfigError(f"the environment variable {variable} is not set; it should hold the API key")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"the environment variable {variable} holds no API key: expected one line of ASCII")
    return key


def run_load(settings: LoadSettings, on_event: OnEvent, on_text: Callable[[str], None] = print) -> LoadOutcome:
    """Run one load in child processes and deliver its events; raise only before the first request is sent.

    `on_text` receives lines for a reader: what is waited for, what the calibration measured.
    """
    check_load(settings)
    api_key = api_key_of(settings)
    RequestSource(settings)  # refuses unreadable files
    on_event(_started(settings.base_url, api_key))
    wait_ready(settings.base_url, settings.model, api_key, settings.ready_timeout_s, ROUTES[settings.endpoint])
    calibration = calibrate(settings) if settings.calibrate else None
    if calibration is not None:
        on_text(calibration.text())
    processes = settings.processes or choose_processes(settings, calibration)
    counters = prefix_counters(settings.base_url, api_key)
    run = _LoadRun(settings, on_event)
    with WorkerPool(settings, api_key, processes) as pool:
        outcome = run.run(pool)
    after = prefix_counters(settings.base_url, api_key) if counters is not None else None
    on_event(run.client_facts(calibration, processes, counters, after))
    on_event(RunEnded(time=time.time(), status=outcome.status, reason=outcome.reason))
    return outcome


def _started(url: str, api_key: str | None) -> RunStarted:
    """Return what is known of client and server; the GPUs of a server on another machine are not."""
    versions = {"llmb": __version__, "python": platform.python_version(), "event_loop": loop_name()}
    version, (gpu_name, device) = server_version(url, api_key), server_device(url)
    return RunStarted(
        time=time.time(),
        world_size=1,
        gpu_name=gpu_name,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=versions if version is None else versions | {"server": version},
        device=device,
    )


@dataclass
class _LoadRun:
    """State of one load in the parent."""

    settings: LoadSettings
    on_event: OnEvent
    start: float = 0.0
    warmup_start: float = 0.0
    sessions: int | None = None
    undelivered: deque[tuple[Any, ...]] = field(default_factory=deque)
    progress: dict[int, tuple[int, int, int, int, int]] = field(default_factory=dict)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    lateness_s: list[float] = field(default_factory=list)

    def run(self, pool: WorkerPool) -> LoadOutcome:
        self.sessions = pool.setup()
        interrupted = False
        try:
            if self.settings.warmup_requests:
                self._warm_up(pool)
            self.start = perf_counter() + HEAD_START_S
            pool.command("start", start=self.start)
            self._collect(pool, None)
        except KeyboardInterrupt:
            interrupted = True
            pool.command("stop")
            self._collect(pool, perf_counter() + DRAIN_S)
        except LaunchError as error:  # a process died: what the others measured is kept
            self._deliver(None)
            return LoadOutcome("failed", str(error))
        self._deliver(None)
        fault = next((end["fault"] for end in self.ends.values() if end["fault"]), None)
        if interrupted:
            done = sum(progress[1] for progress in self.progress.values())
            return LoadOutcome("incomplete", f"interrupted after {done} requests", True)
        return LoadOutcome("failed", fault) if fault else LoadOutcome("ok")

    def _warm_up(self, pool: WorkerPool) -> None:
        self.warmup_start = perf_counter()
        pool.command("warmup", requests=self.settings.warmup_requests)
        limit_s = self.settings.timeout_s * (2 + self.settings.warmup_requests)
        pool.wait_for("warm", limit_s, lambda kind, content: self._take(0, kind, content))
        seconds = perf_counter() - self.warmup_start
        self._deliver(None)
        self.on_event(ServingFacts(warmup_requests=self.settings.warmup_requests, warmup_s=seconds))

    def _collect(self, pool: WorkerPool, deadline: float | None) -> None:
        """Read messages until every process has ended its share, and deliver what there is time for."""
        delivered = 0.0
        while len(self.ends) < len(pool.processes):
            if deadline is not None and perf_counter() > deadline:
                return
            for number, kind, content in pool.messages(POLL_S):
                self._take(number, kind, content)
            if perf_counter() >= delivered + DELIVERY_INTERVAL_S:
                self._deliver(perf_counter() + DELIVERY_S)
                delivered = perf_counter()

    def _take(self, number: int, kind: str, content: Any) -> None:
        if kind == "records":
            self.undelivered.extend(content)
        elif kind == "progress":
            self.progress[number] = content
            self._sample()
        elif kind == "end":
            self.ends[number] = content

    def _deliver(self, deadline: float | None) -> None:
        while self.undelivered and (deadline is None or perf_counter() < deadline):
            record = Record(*self.undelivered.popleft())
            event = self._event(record)
            if not record.warmup and self.settings.concurrency is None and self.settings.is_open_loop:
                self.lateness_s.append(record.sent - record.scheduled)
            self.on_event(event)

    def _event(self, record: Record) -> RequestDone:
        start = self.warmup_start if record.warmup else self.start

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - start, 6)

        multi_turn = self.settings.turns > 1
        return RequestDone(
            request=record.number * (1 if record.warmup else self.settings.turns) + record.turn,
            arrival=round(record.sent - start, 6),
            scheduled=round(record.scheduled - start, 6),
            first_byte=since(record.first_byte),
            first_token=since(record.first_token),
            token_times=tuple([round(moment - start, 6) for moment in record.token_times]),
            end=round(record.end - start, 6),
            input_tokens=record.input_tokens or 0,
            output_tokens=record.output_tokens,
            requested_tokens=record.requested_tokens,
            cached_tokens=record.cached_tokens,
            cacheable_tokens=record.cacheable_tokens,
            counted_by=record.counted_by,
            client_tokens=record.client_tokens,
            session=record.number if multi_turn else None,
            turn=record.turn if multi_turn else None,
            finish=record.finish,
            warmup=record.warmup,
            error=record.error,
        )

    def _sample(self) -> None:
        _, done, waiting, running, tokens = (sum(column) for column in zip(*self.progress.values(), strict=True))
        self.on_event(
            ServingSample(
                elapsed_s=round(max(0.0, perf_counter() - self.start), 6),
                requests=None if self.sessions is None else self.sessions * self.settings.turns,
                done=done,
                waiting=waiting,
                running=running,
                output_tokens=tokens,
            )
        )

    def client_facts(
        self,
        calibration: Calibration | None,
        processes: int,
        before: PrefixCounters | None,
        after: PrefixCounters | None,
    ) -> ClientFacts:
        """Return what the client itself cost, and how late it was."""
        lags = [lag for end in self.ends.values() for lag in end["lag_s"]]
        queries = after.queries - before.queries if before and after else None
        hits = after.hits - before.hits if before and after else None
        return ClientFacts(
            processes=processes,
            request_cost_us=calibration.request_cost_us if calibration else None,
            token_cost_us=calibration.token_cost_us if calibration else None,
            idle_lateness_p50_ms=calibration.lateness_p50_ms if calibration else None,
            idle_lateness_p99_ms=calibration.lateness_p99_ms if calibration else None,
            lateness_ms=_summary_ms(self.lateness_s),
            loop_lag_ms=_summary_ms(lags),
            cpu_fraction=max((end["cpu_fraction"] for end in self.ends.values()), default=None),
            server_cache_queries=queries,
            server_cache_hits=hits,
        )


def _summary_ms(samples_s: list[float]) -> dict[str, float] | None:
    """Return percentiles in ms; None without samples."""
    ranked = {f"p{q}": percentile(samples_s, q) for q in (25, 50, 75, 90, 95, 99)}
    return {name: round(value * 1000, 4) for name, value in ranked.items() if value is not None} or None
