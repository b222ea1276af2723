"""What the benchmark hears of its requests, and how it is written down without holding the engine up.

The clock is read once a step: the host learns all tokens of a step at the same moment. A request that has ended waits
here to be written, a few thousand token times after each step, while the device computes the next one; when thousands
end together the queue is written out over the steps that follow, and the rest at the end.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from llmb.events import RequestDone, ServingSample
from llmb.runtime.recorder import Record
from llmb.serve.benchmark.prompts import Prompt
from llmb.serve.engine import Load as EngineLoad
from llmb.serve.request import Answer, Finish

TIMES_A_STEP = 4096  # token times written after a step, about: some milliseconds
SAMPLE_S = 0.25  # between two samples
PROGRESS_S = 15.0  # between two lines of the log


class StepClock:
    """Seconds since a phase began, the same from one `turn` to the next however often it is asked."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._now: float | None = 0.0

    def now(self) -> float:
        if self._now is None:
            self._now = self.elapsed()
        return self._now

    def elapsed(self) -> float:
        """What the clock says this very moment, to the microsecond."""
        return round(time.perf_counter() - self._begin, 6)

    def turn(self) -> None:
        """The next step begins: the time is read anew when it is next asked for."""
        self._now = None


@dataclass(eq=False, slots=True)
class Flight:
    """A request with the engine: when it arrived, and when the host learned each of its tokens."""

    number: int
    prompt: Prompt
    clock: StepClock
    arrival: float
    times: list[float] = field(default_factory=list)
    end: float | None = None
    output_tokens: int = 0
    answer_crc: int | None = None
    finish: Finish | None = None

    def heard(self, _number: int, _token: int) -> None:
        """A token has come."""
        self.times.append(self.clock.now())

    def ended(self, answer: Answer) -> None:
        """Nothing more will come."""
        self.end, self.output_tokens, self.finish = self.clock.now(), len(answer.tokens), answer.finish
        self.answer_crc = crc32(np.array(answer.tokens, dtype=np.int64).tobytes())

    def done(self, rank: int, warmup: bool) -> RequestDone:
        """As it is recorded; without token times where the answer came whole."""
        assert self.end is not None
        return RequestDone(
            rank=rank,
            request=self.number,
            arrival=self.arrival,
            first_token=self.times[0] if self.times else None,
            token_times=tuple(self.times),
            end=self.end,
            input_tokens=len(self.prompt.tokens),
            output_tokens=self.output_tokens,
            requested_tokens=self.prompt.output_tokens,
            answer_crc=self.answer_crc,
            finish=self.finish,
            warmup=warmup,
        )


class Journal:
    """Writes one phase of this rank's requests into the record, and now and then a line into the log."""

    def __init__(self, record: Record, requests: int, warmup: bool):
        self._record, self._requests, self._warmup = record, requests, warmup
        self._unwritten: deque[Flight] = deque()
        self._next_sample = SAMPLE_S
        self._said_at, self._said_tokens = 0.0, 0

    def ended(self, flight: Flight) -> None:
        """To be written when there is time."""
        self._unwritten.append(flight)

    def write_some(self) -> None:
        """As much as one step leaves time for."""
        left = TIMES_A_STEP
        while self._unwritten and left > 0:
            left -= 1 + self._write()

    def write_all(self) -> None:
        while self._unwritten:
            self._write()

    def _write(self) -> int:
        flight = self._unwritten.popleft()
        self._record.add(flight.done(self._record.rank, self._warmup))
        return len(flight.times)

    def due(self, elapsed: float) -> bool:
        """Whether it is time for a sample."""
        return elapsed >= self._next_sample

    def sample(self, elapsed: float, done: int, output_tokens: int, load: EngineLoad, last: bool = False) -> None:
        """How far the phase is."""
        self._next_sample = elapsed + SAMPLE_S
        self._record.add(
            ServingSample(
                rank=self._record.rank,
                elapsed_s=elapsed,
                warmup=self._warmup,
                requests=self._requests,
                done=done,
                waiting=load.waiting,
                running=load.running,
                output_tokens=output_tokens,
                blocks_used=load.blocks_used,
                blocks=load.blocks,
            )
        )
        if self._record.rank == 0 and (last or elapsed >= self._said_at + PROGRESS_S):
            since, before = (0.0, 0) if last else (self._said_at, self._said_tokens)  # the last line is about it all
            self._said_at, self._said_tokens = elapsed, output_tokens
            print(
                f"{'warm-up' if self._warmup else 'measured'} {elapsed:.1f} s: {done}/{self._requests} requests | "
                f"{(output_tokens - before) / max(elapsed - since, 1e-6):.0f} output tokens/s | "
                f"{load.running} running, {load.waiting} waiting | cache {load.blocks_used}/{load.blocks} blocks",
                flush=True,
            )
