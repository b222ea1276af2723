"""The HTTP process's end of all engines: sends each request to the least loaded, hands out the tokens of each step.

A request is known here from `submit` to its end, exactly once: whoever removes it from `outputs` ends it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmb.serve.http.engine_messages import (
    Cancel,
    EngineState,
    FrameReader,
    StepReport,
    Submit,
    encode_frame,
    encode_prompt,
)
from llmb.serve.http.openai_error import ApiError, engine_failed, queue_full
from llmb.serve.request import FinishReason, SamplingParams, TokenLogprobs


class OutputReceiver(Protocol):
    """Receiver of one output, called as a step's report arrives; `flush` comes last, once for each step."""

    def on_start(self, cached_tokens: int, now: float) -> None: ...

    def on_token(self, token: int, logprobs: TokenLogprobs | None, now: float) -> bool:
        """Take a token; return whether the output ends here, by a stop string."""
        ...

    def on_end(self, finish_reason: FinishReason, now: float) -> None: ...

    def on_error(self, error: ApiError) -> None: ...

    def flush(self) -> None: ...


@dataclass(eq=False, slots=True)
class Route:
    """A scheduler that requests can go to: of a replica, or of a rank with attention data parallelism."""

    label: str  # in the metrics
    connection: "WorkerConnection"  # to rank 0, which takes the commands
    shard: int
    slots: int = 0  # sequences that it runs at once
    load: int = 0  # unfinished requests
    state: EngineState = field(default_factory=EngineState)
    active_at: float = 0.0  # when it last reported, or got a request while it was idle


@dataclass(eq=False, slots=True)
class PendingOutput:
    """An unfinished request."""

    route: Route
    receiver: OutputReceiver
    started: bool = False


class WorkerConnection(asyncio.Protocol):
    """Socket to one engine process."""

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]):
        self.on_message, self._on_lost = on_message, on_lost
        self._frames = FrameReader()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self.on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def send(self, message: Any) -> None:
        self._transport.write(encode_frame(message))

    def close(self) -> None:
        self._transport.close()


@dataclass(eq=False)
class EngineRouter:
    """All routes, and the unfinished requests on them."""

    max_queue: int
    routes: list[Route] = field(default_factory=list)
    outputs: dict[int, PendingOutput] = field(default_factory=dict)
    num_waiting: int = 0  # submitted and not started
    failed: bool = False
    generation_tokens: int = 0
    _next_id: int = 0

    def check_capacity(self, count: int) -> None:
        """Raise a 429 if so many more requests would not fit into the queue; an idle server takes any number."""
        if self.failed:
            raise engine_failed()
        if self.outputs and self.num_waiting + count > self.max_queue + self._num_free_slots():
            raise queue_full(self.max_queue)

    def _num_free_slots(self) -> int:
        """Return how many waiting requests the next step will start: none while an engine has a queue of its own."""
        if any(route.state.waiting for route in self.routes):
            return 0
        num_started = len(self.outputs) - self.num_waiting
        return max(0, sum(route.slots for route in self.routes) - num_started)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, params: SamplingParams, ignore_eos: bool, receiver: OutputReceiver
    ) -> int:
        """Send a request to the least loaded engine; return its id."""
        if self.failed:
            raise engine_failed()
        route = min(self.routes, key=lambda route: route.load)
        request_id, self._next_id = self._next_id, self._next_id + 1
        if not route.load:
            route.active_at = time.perf_counter()
        route.load += 1
        self.num_waiting += 1
        self.outputs[request_id] = PendingOutput(route, receiver)
        command = Submit(request_id, route.shard, encode_prompt(list(prompt)), max_tokens, params, ignore_eos)
        route.connection.send(command)
        return request_id

    def cancel(self, request_id: int) -> bool:
        """End a request whose output nobody reads any more; False if it has ended already."""
        pending = self._remove(request_id)
        if pending is not None and not self.failed:
            pending.route.connection.send(Cancel(request_id, pending.route.shard))
        return pending is not None

    def on_report(self, route: Route, report: StepReport) -> None:
        """Hand out everything that a step changed."""
        now, outputs, touched = time.perf_counter(), self.outputs, []
        route.state, route.active_at = report.state, now
        for request_id, cached_tokens in report.starts:
            if (pending := outputs.get(request_id)) is not None:
                pending.started = True
                self.num_waiting -= 1
                pending.receiver.on_start(cached_tokens, now)
        self.generation_tokens += len(report.tokens)
        logprobs = report.logprobs
        for index, request_id in enumerate(report.request_ids):
            if (pending := outputs.get(request_id)) is not None:
                entry = logprobs.get(index) if logprobs is not None else None
                if pending.receiver.on_token(report.tokens[index], entry, now):
                    self.cancel(request_id)
                touched.append(pending.receiver)
        for request_id, finish_reason in report.ends:
            if (pending := self._remove(request_id)) is not None:
                pending.receiver.on_end(finish_reason, now)
        for receiver in touched:
            receiver.flush()
        for request_id, message in report.refusals:
            if (pending := self._remove(request_id)) is not None:
                pending.receiver.on_error(ApiError(message))

    def is_stalled(self, limit_s: float) -> bool:
        """Return whether an engine has requests and has not reported for so long."""
        now = time.perf_counter()
        return any(route.load and now - route.active_at > limit_s for route in self.routes)

    def fail(self) -> None:
        """End every request with an error: an engine is gone."""
        self.failed = True
        for request_id in list(self.outputs):
            if (pending := self._remove(request_id)) is not None:
                pending.receiver.on_error(engine_failed())

    def _remove(self, request_id: int) -> PendingOutput | None:
        pending = self.outputs.pop(request_id, None)
        if pending is not None:
            pending.route.load -= 1
            self.num_waiting -= not pending.started
        return pending

    def states(self) -> dict[str, EngineState]:
        return {route.label: route.state for route in self.routes}
