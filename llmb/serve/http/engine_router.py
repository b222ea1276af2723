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

TOKENS_AT_ONCE = 8  # handed out before the event loop goes on with new requests: 0.1 ms, of each of several turns


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
    has_token: bool = False


@dataclass(eq=False, slots=True)
class _Delivery:
    """The rest of a report: tokens of outputs that have begun and go on.

    Writing hundreds of chunks takes milliseconds. First tokens and ends are written before all others, and new requests
    are read in between, so that they reach the engine before its next step.
    """

    report: StepReport
    indices: list[int]  # of tokens that are not handed out yet
    now: float  # when the report came

    def take(self, count: int) -> list[int]:
        indices, self.indices = self.indices[:count], self.indices[count:]
        return indices


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
    _delivery: _Delivery | None = None

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
        """Hand out everything that a step changed, or begin to: see `_Delivery`."""
        self._finish_delivery()
        now = time.perf_counter()
        route.state, route.active_at = report.state, now
        for request_id, cached_tokens in report.starts:
            if (pending := self.outputs.get(request_id)) is not None:
                pending.started = True
                self.num_waiting -= 1
                pending.receiver.on_start(cached_tokens, now)
        self.generation_tokens += len(report.tokens)
        ended = {request_id for request_id, _ in report.ends}
        urgent: list[int] = []
        others: list[int] = []
        for index, request_id in enumerate(report.request_ids):
            pending = self.outputs.get(request_id)
            is_urgent = pending is not None and (request_id in ended or not pending.has_token)
            (urgent if is_urgent else others).append(index)
        self._hand_out(report, urgent, now, report.ends)
        for request_id, message in report.refusals:
            if (pending := self._remove(request_id)) is not None:
                pending.receiver.on_error(ApiError(message))
        if others:
            self._delivery = _Delivery(report, others, now)
            asyncio.get_running_loop().call_soon(self._continue_delivery, self._delivery)

    def _finish_delivery(self) -> None:
        """Hand out all tokens that are left of the report before."""
        if (delivery := self._delivery) is not None:
            self._delivery = None
            self._hand_out(delivery.report, delivery.indices, delivery.now)

    def _continue_delivery(self, delivery: _Delivery) -> None:
        """Hand out a few more tokens of a report, unless a newer one has finished it."""
        if self._delivery is not delivery:
            return
        self._hand_out(delivery.report, delivery.take(TOKENS_AT_ONCE), delivery.now)
        if delivery.indices:
            asyncio.get_running_loop().call_soon(self._continue_delivery, delivery)
        else:
            self._delivery = None

    def _hand_out(
        self, report: StepReport, indices: list[int], now: float, ends: Sequence[tuple[int, FinishReason]] = ()
    ) -> None:
        """Hand out these tokens of a report, then these ends."""
        outputs, logprobs, touched = self.outputs, report.logprobs, []
        for index in indices:
            request_id = report.request_ids[index]
            if (pending := outputs.get(request_id)) is not None:
                pending.has_token = True
                entry = logprobs.get(index) if logprobs is not None else None
                if pending.receiver.on_token(report.tokens[index], entry, now):
                    self.cancel(request_id)
                touched.append(pending.receiver)
        for request_id, finish_reason in ends:
            if (pending := self._remove(request_id)) is not None:
                pending.receiver.on_end(finish_reason, now)
        for receiver in touched:
            receiver.flush()

    def is_stalled(self, limit_s: float) -> bool:
        """Return whether an engine has requests and has not reported for so long."""
        now = time.perf_counter()
        return any(route.load and now - route.active_at > limit_s for route in self.routes)

    def fail(self) -> None:
        """End every request with an error: an engine is gone."""
        self._finish_delivery()
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
