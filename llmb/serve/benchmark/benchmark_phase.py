"""One phase of the benchmark, warm-up or measured: send a load, and step the engine until all requests have ended.

    seconds = BenchmarkPhase(engine, work, eos, load, recorder).run()

The first requests arrive at the beginning of the phase, every other one when one ends. Ranks that compute the same
requests run the same phase: what is sent depends only on what has ended. Requests at a rate are sent before the first
step that is scheduled after their time; they are refused for several ranks, whose clocks would decide differently.
"""

import time
from collections import deque
from itertools import count, islice

from llmb.config.spec import Inference
from llmb.loadgen.prompt_sampler import Prompt
from llmb.serve.benchmark.request_load import RequestLoad
from llmb.serve.benchmark.request_recorder import InFlightRequest, PhaseClock, RequestRecorder
from llmb.serve.benchmark.step_trace import StepTrace
from llmb.serve.engine import Engine
from llmb.serve.request import Request, RequestOutput, SamplingParams


class BenchmarkPhase:
    """Runs once; its clock starts at construction. `recorder` is None if another rank records."""

    def __init__(
        self,
        engine: Engine,
        work: Inference,
        eos: frozenset[int],
        load: RequestLoad,
        recorder: RequestRecorder | None,
        trace: StepTrace | None = None,
    ):
        self._engine, self._work, self._eos, self._load = engine, work, eos, load
        self._recorder, self._trace = recorder, trace
        self._arrivals = iter(load.prompts)
        self._due_s = deque(load.due_s or ())
        self._in_flight: dict[int, InFlightRequest] = {}
        self._num_finished = self._num_finished_tokens = 0
        self._clock = PhaseClock()

    def run(self) -> float:
        """Send and step until the last request has ended; return the seconds that took."""
        if self._load.due_s is None:
            for request_id, prompt in islice(self._arrivals, self._load.concurrency):
                self._send(request_id, prompt)
        for step in count():
            self._send_due()
            if self._trace is not None:
                self._trace.before(step)
            self._clock.next_step()
            running = self._engine.step()
            if self._trace is not None:
                self._trace.after(step)
            if not running and self._due_s:
                time.sleep(max(0.0, self._due_s[0] - self._clock.elapsed()))  # the engine is idle until then
                self._clock.next_step()
            elif not running:
                break
            if self._recorder is not None:
                self._record(self._recorder)
        return self._close()

    def _record(self, recorder: RequestRecorder) -> None:
        """Write events while the device computes."""
        recorder.write_some()
        if recorder.is_sample_due(elapsed := self._clock.elapsed()):
            self._sample(recorder, elapsed)

    def _close(self) -> float:
        seconds = self._clock.elapsed()
        total = len(self._load.prompts)
        if unfinished := total - self._num_finished:
            raise RuntimeError(f"the engine is idle, but {unfinished} of {total} requests are unfinished")
        if self._recorder is not None:
            self._sample(self._recorder, seconds, last=True)
        return seconds

    def _send_due(self) -> None:
        """Send every request whose time has come, or comes while the engine can wait for it."""
        while self._due_s:
            wait_s = self._due_s[0] - self._clock.elapsed()
            if wait_s > self._engine.slack_s:
                return
            time.sleep(max(0.0, wait_s))
            request_id, prompt = next(self._arrivals)
            self._send(request_id, prompt, self._due_s.popleft())

    def _send(self, request_id: int, prompt: Prompt, due_s: float | None = None) -> None:
        work = self._work
        arrival = self._clock.now() if due_s is None else self._clock.elapsed()
        request = InFlightRequest(request_id, prompt, self._clock, arrival, due_s)
        self._in_flight[request_id] = request
        self._engine.submit(
            Request(
                request_id=request_id,
                prompt=prompt.tokens,
                max_tokens=prompt.output_tokens,
                sampling_params=SamplingParams(
                    temperature=work.temperature, top_k=work.top_k, top_p=work.top_p, seed=work.seed + request_id
                ),
                eos=self._eos,
                ignore_eos=work.ignore_eos,
                on_token=request.on_token if work.streaming and self._recorder is not None else None,
                on_end=self._on_end,
            )
        )

    def _on_end(self, output: RequestOutput) -> None:
        request = self._in_flight.pop(output.request_id)
        request.on_end(output)
        self._num_finished += 1
        self._num_finished_tokens += request.output_tokens
        if self._recorder is not None:
            self._recorder.add(request)
        if self._load.due_s is None:
            for request_id, prompt in islice(self._arrivals, 1):
                self._send(request_id, prompt)

    def _sample(self, recorder: RequestRecorder, elapsed: float, last: bool = False) -> None:
        tokens = self._num_finished_tokens + sum(len(request.token_times) for request in self._in_flight.values())
        recorder.sample(elapsed, self._num_finished, tokens, self._engine.stats, last)
