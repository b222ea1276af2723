"""One phase of the benchmark, warm-up or measured: a load is sent, and the engine steps until all of it has ended.

    seconds = Phase(engine, load, ask, journal).run()

The first requests arrive at the beginning of the phase, each other one the moment that one ends. Ranks that compute the
same requests run the same phase: what is sent depends on what has ended and on nothing else.
"""

from dataclasses import dataclass
from itertools import islice

from llmb.infer.engine import Engine
from llmb.infer.journal import Flight, Journal, StepClock
from llmb.infer.load import Load
from llmb.infer.prompts import Prompt
from llmb.infer.request import Answer, Request, Sampling
from llmb.infer.trace import Trace
from llmb.spec import Inference


@dataclass(frozen=True)
class Phase:
    """What is needed to run it; `journal` is none on ranks that leave the recording to another."""

    engine: Engine
    work: Inference
    eos: frozenset[int]
    load: Load
    journal: Journal | None
    trace: Trace | None = None

    def run(self) -> float:
        """Until the last request has ended; how many seconds that took."""
        return _Run(self).finish()


class _Run:
    """A phase under way."""

    def __init__(self, phase: Phase):
        self._phase, self._engine, self._journal = phase, phase.engine, phase.journal
        self._coming = iter(phase.load.prompts)
        self._flights: dict[int, Flight] = {}
        self._done = self._tokens_of_done = 0
        self._clock = StepClock()

    def finish(self) -> float:
        """Send and step until nothing is left."""
        trace, step = self._phase.trace, 0
        for number, prompt in islice(self._coming, self._phase.load.in_flight):
            self._send(number, prompt)
        going = True
        while going:
            if trace is not None:
                trace.before(step)
            self._clock.turn()
            going = self._engine.step()
            if trace is not None:
                trace.after(step)
            if self._journal is not None:
                self._journal.write_some()
                if self._journal.due(elapsed := self._clock.elapsed()):
                    self._sample(elapsed)
            step += 1
        return self._close()

    def _close(self) -> float:
        seconds = self._clock.elapsed()
        asked = len(self._phase.load.prompts)
        if self._done != asked:
            raise RuntimeError(f"the engine has nothing left to do, but {asked - self._done} of {asked} requests do")
        if self._journal is not None:
            self._sample(seconds)
        return seconds

    def _send(self, number: int, prompt: Prompt) -> None:
        work = self._phase.work
        flight = Flight(number, prompt, self._clock, self._clock.now())
        self._flights[number] = flight
        self._engine.submit(
            Request(
                number=number,
                prompt=prompt.tokens,
                max_tokens=prompt.output_tokens,
                sampling=Sampling(
                    temperature=work.temperature, top_k=work.top_k, top_p=work.top_p, seed=work.seed + number
                ),
                eos=self._phase.eos,
                ignore_eos=work.ignore_eos,
                on_token=flight.heard if work.streaming and self._journal is not None else None,
                on_end=self._ended,
            )
        )

    def _ended(self, answer: Answer) -> None:
        flight = self._flights.pop(answer.number)
        flight.ended(answer)
        self._done += 1
        self._tokens_of_done += flight.output_tokens
        if self._journal is not None:
            self._journal.ended(flight)
        for number, prompt in islice(self._coming, 1):
            self._send(number, prompt)

    def _sample(self, elapsed: float) -> None:
        assert self._journal is not None
        tokens = self._tokens_of_done + sum(len(flight.times) for flight in self._flights.values())
        self._journal.sample(elapsed, self._done, tokens, self._engine.load)
