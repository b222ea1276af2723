"""Records the requests of a benchmark without holding the engine up.

The clock is read once a step: the host reads all tokens of a step at the same moment. Finished requests are queued and
written, a few thousand token times after each step, while the device computes the next one; when thousands end together
the queue is written over the steps that follow, and what is left at the end.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from llmb.events import RequestDone, ServingSample
from llmb.loadgen.prompt_sampler import Prompt
from llmb.runtime.recorder import EventRecorder
from llmb.serve.engine import EngineStats
from llmb.serve.request import FinishReason, RequestOutput

TOKEN_TIMES_PER_STEP = 4096  # written after a step, approximately: some milliseconds
SAMPLE_S = 0.25  # between two samples
PROGRESS_S = 15.0  # between two lines of the log


class PhaseClock:
    """Seconds since a phase began, constant within a step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._now: float | None = 0.0

    def now(self) -> float:
        """Return the time of this step, read on the first call in it."""
        if self._now is None:
            self._now = self.elapsed()
        return self._now

    def elapsed(self) -> float:
        """Return the time of this moment, to the microsecond."""
        return round(time.perf_counter() - self._start, 6)

    def next_step(self) -> None:
        """Begin the next step: the next `now` reads the time again."""
        self._now = None


@dataclass(eq=False, slots=True)
class InFlightRequest:
    """A request in the engine: when it arrived, and when the host read each of its tokens."""

    request_id: int
    prompt: Prompt
    clock: PhaseClock
    arrival: float
    scheduled: float | None = None  # when it was due, of requests at a rate
    token_times: list[float] = field(default_factory=list)
    end: float | None = None
    output_tokens: int = 0
    output_crc: int | None = None
    finish_reason: FinishReason | None = None

    def on_token(self, _request_id: int, _token: int) -> None:
        self.token_times.append(self.clock.now())

    def on_end(self, output: RequestOutput) -> None:
        self.end, self.output_tokens = self.clock.now(), len(output.token_ids)
        self.finish_reason = output.finish_reason
        self.output_crc = crc32(np.array(output.token_ids, dtype=np.int64).tobytes())

    def to_event(self, rank: int, warmup: bool) -> RequestDone:
        """Return the event of a finished request; it has no token times without streaming."""
        assert self.end is not None
        return RequestDone(
            rank=rank,
            request=self.request_id,
            arrival=self.arrival,
            scheduled=None if self.scheduled is None else round(self.scheduled, 6),
            first_token=self.token_times[0] if self.token_times else None,
            token_times=tuple(self.token_times),
            end=self.end,
            input_tokens=len(self.prompt.tokens),
            output_tokens=self.output_tokens,
            requested_tokens=self.prompt.output_tokens,
            output_crc=self.output_crc,
            finish=self.finish_reason,
            warmup=warmup,
        )


class RequestRecorder:
    """Records the events of this rank's requests in a phase, and logs the progress."""

    def __init__(self, events: EventRecorder, requests: int, warmup: bool):
        self._events, self._requests, self._warmup = events, requests, warmup
        self._unwritten: deque[InFlightRequest] = deque()
        self._next_sample = SAMPLE_S
        self._logged_at, self._logged_tokens = 0.0, 0

    def add(self, request: InFlightRequest) -> None:
        """Queue a finished request for writing."""
        self._unwritten.append(request)

    def write_some(self) -> None:
        """Write as many requests as one step has time for."""
        budget = TOKEN_TIMES_PER_STEP
        while self._unwritten and budget > 0:
            budget -= 1 + self._write()

    def write_all(self) -> None:
        while self._unwritten:
            self._write()

    def _write(self) -> int:
        request = self._unwritten.popleft()
        self._events.add(request.to_event(self._events.rank, self._warmup))
        return len(request.token_times)

    def is_sample_due(self, elapsed: float) -> bool:
        return elapsed >= self._next_sample

    def sample(self, elapsed: float, done: int, output_tokens: int, stats: EngineStats, last: bool = False) -> None:
        """Record the progress of the phase, and log it now and then."""
        self._next_sample = elapsed + SAMPLE_S
        self._events.add(
            ServingSample(
                rank=self._events.rank,
                elapsed_s=elapsed,
                warmup=self._warmup,
                requests=self._requests,
                done=done,
                waiting=stats.waiting,
                running=stats.running,
                output_tokens=output_tokens,
                blocks_used=stats.blocks_used,
                blocks=stats.blocks,
            )
        )
        if self._events.rank == 0 and (last or elapsed >= self._logged_at + PROGRESS_S):
            since, before = (0.0, 0) if last else (self._logged_at, self._logged_tokens)  # the last line covers it all
            self._logged_at, self._logged_tokens = elapsed, output_tokens
            print(
                f"{'warm-up' if self._warmup else 'measured'} {elapsed:.1f} s: {done}/{self._requests} requests | "
                f"{(output_tokens - before) / max(elapsed - since, 1e-6):.0f} output tokens/s | "
                f"{stats.running} running, {stats.waiting} waiting | cache {stats.blocks_used}/{stats.blocks} blocks",
                flush=True,
            )
