"""Calibration: what the client itself costs, measured on a no-op server on this machine before a load.

    calibrate(settings) -> Calibration(request_cost_us=61.0, token_cost_us=1.9, lateness_p50_ms=0.05, ...)

Costs are CPU time of one client process per request and per streamed token; lateness is how long after its time a
request was sent, of one process at a low rate. A server is measured honestly only if these are small beside its own.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from time import perf_counter
from typing import Any

from llmb.config.load_settings import LoadSettings
from llmb.errors import LaunchError
from llmb.loadgen.load_worker import Record
from llmb.loadgen.worker_pool import WorkerPool, python_environment
from llmb.perfmodel.metrics import percentile

CONCURRENCY = 32
SHORT_OSL, LONG_OSL = 1, 129
SHORT_REQUESTS, LONG_REQUESTS, PACED_REQUESTS = 1500, 300, 120
PACED_RATE = 200.0  # requests/s
BUSY_LIMIT = 0.5  # of a core, that one process should need
USER_TOKENS_PER_S = 200.0  # that a user of a closed loop may receive, when processes are counted


@dataclass(frozen=True)
class Calibration:
    """Costs of one client process."""

    request_cost_us: float
    token_cost_us: float
    lateness_p50_ms: float
    lateness_p99_ms: float
    requests_per_s: float  # of the short requests, client and server on this machine
    tokens_per_s: float  # of the long ones

    def text(self) -> str:
        """Return it in one line."""
        return (
            f"client: {self.request_cost_us:.0f} us CPU per request, {self.token_cost_us:.2f} us per streamed token; "
            f"sends {self.lateness_p50_ms:.2f} ms late (p50), {self.lateness_p99_ms:.2f} ms (p99); on a no-op server "
            f"{self.requests_per_s:,.0f} requests/s, {self.tokens_per_s:,.0f} tokens/s with one process"
        )


class NoopServerProcess:
    """No-op server in a process of its own; use as a context manager."""

    def __init__(self, *options: str):
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llmb.loadgen.noop_server", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=python_environment(),
                text=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {sys.executable}: {error.strerror}") from error
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.url = line.strip().rpartition(" ")[2]
        if not self.url.startswith("http"):
            self.close()
            raise LaunchError(f"the no-op server did not start: {line.strip() or 'no output'}")

    def __enter__(self) -> "NoopServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass(frozen=True)
class Probe:
    """One load on the no-op server."""

    cpu_s: float
    seconds: float
    records: list[Record]


def run_probe(settings: LoadSettings, processes: int = 1) -> Probe:
    """Run a load without events and return what it took."""
    records: list[Record] = []
    ends: dict[int, Any] = {}
    with WorkerPool(settings, None, processes) as pool:
        pool.setup()
        start = perf_counter() + 0.05
        pool.command("start", start=start)
        while len(ends) < processes:
            for number, kind, content in pool.messages(0.1):
                if kind == "records":
                    records += [Record(*fields) for fields in content]
                elif kind == "end":
                    ends[number] = content
    seconds = max((record.end for record in records), default=start) - start
    return Probe(sum(end["cpu_s"] for end in ends.values()), seconds, records)


def calibrate(settings: LoadSettings) -> Calibration:
    """Measure this client on a no-op server; once per process for each kind of response."""
    return _calibrate(settings.endpoint, settings.streaming)


@cache
def _calibrate(endpoint: Any, streaming: bool) -> Calibration:
    with NoopServerProcess() as server:
        load = LoadSettings(
            base_url=server.url, model="noop", endpoint=endpoint, streaming=streaming, isl=16, osl=SHORT_OSL,
            concurrency=CONCURRENCY, num_requests=SHORT_REQUESTS, calibrate=False,
        )  # fmt: skip
        short = run_probe(load)
        long = run_probe(replace(load, osl=LONG_OSL, num_requests=LONG_REQUESTS))
        paced = run_probe(
            replace(load, arrivals="constant", rate=PACED_RATE, concurrency=None, num_requests=PACED_REQUESTS)
        )
    per_short, per_long = short.cpu_s / SHORT_REQUESTS, long.cpu_s / LONG_REQUESTS
    lateness = [record.sent - record.scheduled for record in paced.records]
    return Calibration(
        request_cost_us=per_short * 1e6,
        token_cost_us=max(0.0, per_long - per_short) / (LONG_OSL - SHORT_OSL) * 1e6,
        lateness_p50_ms=(percentile(lateness, 50) or 0.0) * 1000,
        lateness_p99_ms=(percentile(lateness, 99) or 0.0) * 1000,
        requests_per_s=SHORT_REQUESTS / short.seconds,
        tokens_per_s=LONG_REQUESTS * LONG_OSL / long.seconds,
    )


def choose_processes(settings: LoadSettings, calibration: Calibration | None) -> int:
    """Return how many client processes a load needs, so that none is busy for more than half of the time."""
    if calibration is None:
        return 1
    tokens = settings.osl if settings.streaming else 0
    request_s = (calibration.request_cost_us + tokens * calibration.token_cost_us) * 1e-6
    if settings.rate is not None:
        busy = settings.rate * request_s
    else:
        users = settings.concurrency or settings.num_requests or 1
        busy = users * USER_TOKENS_PER_S / settings.osl * request_s
    limit = min(_cores(), settings.concurrency or settings.num_requests or _cores())
    return max(1, min(limit, ceil(busy / BUSY_LIMIT)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
