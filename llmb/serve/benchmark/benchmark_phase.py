"""One phase of the benchmark, warm-up or measured: a load is sent, and the engine steps until all of it has ended.

    seconds = Phase(engine, work, eos, load, journal).run()

The first requests arrive at the beginning of the phase, each other one the moment that one ends. Ranks that compute the
same requests run the same phase: what is sent depends on what has ended and on nothing else.
"""

from itertools import count, islice

from llmb.config.spec import Inference
from llmb.serve.benchmark.arrivals import Load
from llmb.serve.benchmark.prompts import Prompt
from llmb.serve.benchmark.request_recorder import Flight, Journal, StepClock
from llmb.serve.benchmark.step_trace import Trace
from llmb.serve.engine import Engine
from llmb.serve.request import Answer, Request, Sampling


class Phase:
    """To be run once, at once: its clock starts when it is made. `journal` is none where another rank records."""

    def __init__(
        self,
        engine: Engine,
        work: Inference,
        eos: frozenset[int],
        load: Load,
        journal: Journal | None,
        trace: Trace | None = None,
    ):
        self._engine, self._work, self._eos, self._load = engine, work, eos, load
        self._journal, self._trace = journal, trace
        self._coming = iter(load.prompts)
        self._flights: dict[int, Flight] = {}
        self._done = self._tokens_of_done = 0
        self._clock = StepClock()

    def run(self) -> float:
        """Send and step until the last request has ended; how many seconds that took."""
        for number, prompt in islice(self._coming, self._load.in_flight):
            self._send(number, prompt)
        for step in count():
            if self._trace is not None:
                self._trace.before(step)
            self._clock.turn()
            going = self._engine.step()
            if self._trace is not None:
                self._trace.after(step)
            if not going:
                break
            if self._journal is not None:
                self._write(self._journal)
        return self._close()

    def _write(self, journal: Journal) -> None:
        """While the device computes."""
        journal.write_some()
        if journal.due(elapsed := self._clock.elapsed()):
            self._sample(journal, elapsed)

    def _close(self) -> float:
        seconds = self._clock.elapsed()
        asked = len(self._load.prompts)
        if self._done != asked:
            raise RuntimeError(f"the engine has nothing left to do, but {asked - self._done} of {asked} requests do")
        if self._journal is not None:
            self._sample(self._journal, seconds, last=True)
        return seconds

    def _send(self, number: int, prompt: Prompt) -> None:
        work = self._work
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
                eos=self._eos,
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

    def _sample(self, journal: Journal, elapsed: float, last: bool = False) -> None:
        tokens = self._tokens_of_done + sum(len(flight.times) for flight in self._flights.values())
        journal.sample(elapsed, self._done, tokens, self._engine.load, last)
