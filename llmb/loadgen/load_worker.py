"""One process of a load: sends its requests when they are due and records each.

    worker = LoadWorker(loop, settings, source, api_key, index=0, size=2)
    await worker.run(start)                 # start: of the load, by time.perf_counter(), the same in all processes
    worker.take_records()

Everything that is due at a time waits in one heap with one timer. A request that is held back (by the cap, or because
this process is late) keeps the time at which it was due: latency counts from there too.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count, islice
from time import perf_counter
from typing import NamedTuple

from llmb.config.load_settings import LoadSettings
from llmb.loadgen.arrivals import Arrivals, arrival_times, share, slot_starts
from llmb.loadgen.client.http_client import Exchange, HttpClient, Target
from llmb.loadgen.client.request_body import RequestRenderer, Turn
from llmb.loadgen.pacer import Pacer
from llmb.loadgen.prompt_text import TextWriter
from llmb.loadgen.request_source import LoadRequest, RequestSource, Session

RENDERED_BYTES = 256 << 20  # of payloads that are rendered before the load starts
HOPELESS = 100  # failed requests without a single success, after which the load ends
WARMUP_CONCURRENCY = 16  # of a load without a limit
EXPIRE_S = 0.25  # between two looks for requests that exceed the timeout
OPEN_AHEAD = 4096  # connections opened before the start, at most

RATE_AHEAD = 128  # of a load at a rate, whose concurrency is not known
RENDER_AHEAD = 8  # payloads of a closed loop, so that the gap to the next request is not the time to render it


class Record(NamedTuple):
    """One finished request in plain data; times are absolute."""

    number: int  # of its session
    turn: int
    scheduled: float
    sent: float
    first_byte: float | None
    first_token: float | None
    token_times: "array[float]"
    end: float
    input_tokens: int | None
    output_tokens: int
    requested_tokens: int
    cached_tokens: int | None
    cacheable_tokens: int | None
    counted_by: str  # usage: of the server; tokenizer; chunks: of the stream; nobody: output_tokens is unknown
    client_tokens: int | None  # of the output, by the tokenizer
    finish: str | None
    error: str | None
    warmup: bool


class ActiveRequest(Exchange):
    """A request in progress and the session it belongs to."""

    __slots__ = ("history", "history_tokens", "index", "request", "scheduled", "session", "turn")

    def __init__(self, streaming: bool, keep_text: bool, index: int, session: Session, turn: int, scheduled: float):
        super().__init__(streaming, keep_text)
        self.index, self.session, self.turn, self.scheduled = index, session, turn, scheduled
        self.request: LoadRequest = session.turns[turn]
        self.history: tuple[Turn, ...] = ()
        self.history_tokens = 0  # input and output of the turns before


class LoadWorker:
    """Drives the requests of one process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: LoadSettings,
        source: RequestSource,
        api_key: str | None = None,
        index: int = 0,
        size: int = 1,
    ):
        self._loop, self._settings, self._source = loop, settings, source
        self._index, self._size = index, size
        self._renderer = RequestRenderer(settings, api_key)
        self._writer = TextWriter(source.tokenizer)
        self._text_prompts = settings.prompt_format == "text"
        self._keep_text = settings.turns > 1 or source.tokenizer is not None
        self._client = HttpClient(loop, Target.from_url(settings.base_url), self._on_end, settings.timeout_s)  # type: ignore[arg-type]
        self._pacer = Pacer(loop, self._run_due)
        self._rendered: dict[int, tuple[Session, bytes]] = {}
        self._records: deque[Record] = deque()
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._waiting: deque[tuple[int, float]] = deque()  # sessions that are due but held back by the cap
        self._numbers: Iterator[int] = iter(())  # indexes of sessions that have not begun
        self._ahead: deque[int] = deque()  # such indexes whose payloads are rendered
        self._due_times: Iterator[float] = iter(())
        self._cap: int | None = None
        self._start, self._deadline = 0.0, float("inf")
        self._warmup = self._stopped = False
        self._active: set[ActiveRequest] = set()
        self._sessions = 0  # in progress
        self._finished = asyncio.Event()
        self.sent = self.done = self.failed = self.finished_tokens = 0
        self.fault: str | None = None  # why the load ended early

    async def prepare(self) -> None:
        """Render payloads and open connections, before the load starts."""
        total = self._source.count
        limit = self._settings.concurrency or (OPEN_AHEAD if self._settings.arrivals == "all_at_once" else RATE_AHEAD)
        most = limit if total is None else min(limit, total)
        if self._settings.turns == 1:
            size = 0
            for number in range(self._index, limit if total is None else total, self._size):
                _, payload = self._rendered_session(number)
                size += len(payload)
                if size > RENDERED_BYTES:
                    break
        await self._client.open(min(OPEN_AHEAD, share(most, self._index, self._size)))

    async def warm_up(self, requests: int) -> None:
        """Send this process's share of the warm-up at the concurrency of the load."""
        self._warmup = True
        limit = share(self._settings.concurrency or WARMUP_CONCURRENCY, self._index, self._size)
        self._numbers = iter(range(self._index, requests, self._size))
        await self._run([0.0] * max(1, limit), perf_counter())
        self._warmup = False
        self.sent = self.done = self.failed = self.finished_tokens = 0

    async def run(self, start: float) -> None:
        """Send the load and wait until its last request has ended."""
        settings, total = self._settings, self._source.count
        numbers = count(self._index, self._size) if total is None else iter(range(self._index, total, self._size))
        self._numbers = numbers
        if settings.duration_s is not None:
            self._deadline = start + settings.duration_s
        if settings.is_open_loop:
            if settings.concurrency is not None:
                self._cap = max(1, share(settings.concurrency, self._index, self._size))
            if settings.arrivals != "trace":
                rate = settings.rate
                assert rate is not None
                arrivals = Arrivals(settings.arrivals, rate, settings.burstiness, settings.ramp_s, settings.ramp_start)  # type: ignore[arg-type]
                self._due_times = islice(arrival_times(arrivals, settings.seed), self._index, None, self._size)
            await self._run([], start)
        else:
            concurrency = settings.concurrency if settings.concurrency is not None else total
            assert concurrency is not None
            starts = slot_starts(concurrency, settings.ramp_s, settings.ramp_start)
            await self._run(starts[self._index :: self._size], start)

    async def _run(self, slots: list[float], start: float) -> None:
        self._start = start
        self._finished.clear()
        expiry = self._loop.create_task(self._expire())
        if self._settings.is_open_loop and not self._warmup:
            self._push_arrival()
        for slot in slots:
            self._push(start + slot, self._begin_next)
        self._check_finished()
        self._arm()
        await self._finished.wait()
        expiry.cancel()

    def stop(self) -> None:
        """Send nothing more and drop what is in progress."""
        self._stopped = True
        self._client.abort_all("interrupted")
        self._finished.set()

    def close(self) -> None:
        self._pacer.close()
        self._client.close()

    @property
    def progress(self) -> tuple[int, int, int, int, int]:
        """Requests sent, done, held back and in progress, and output tokens so far."""
        tokens = self.finished_tokens + sum(len(request.reader.token_times) for request in self._active)
        return self.sent, self.done, len(self._waiting), len(self._active), tokens

    def take_records(self, most: int | None = None) -> list[Record]:
        """Remove and return the oldest records."""
        size = len(self._records) if most is None else min(most, len(self._records))
        return [self._records.popleft() for _ in range(size)]

    def _push(self, due: float, action: Callable[[float], None]) -> None:
        heappush(self._heap, (due, next(self._order), action))

    def _arm(self) -> None:
        if self._heap and not self._stopped:
            self._pacer.set(self._heap[0][0])

    def _run_due(self) -> None:
        """Run everything that is due; late ones are made up for at once."""
        if self._stopped:
            return
        while self._heap and self._heap[0][0] <= perf_counter():
            due, _, action = heappop(self._heap)
            action(due)
        self._check_finished()
        self._arm()

    def _push_arrival(self) -> None:
        """Queue the next arrival of an open loop, with its payload rendered ahead of time."""
        number = next(self._numbers, None)
        if number is None:
            return
        session, _ = self._rendered_session(number)
        offset = session.due_s if session.due_s is not None else next(self._due_times)
        if self._start + offset >= self._deadline:
            self._numbers = iter(())
            return

        def arrive(due: float) -> None:
            if self._cap is not None and self._sessions >= self._cap:
                self._waiting.append((number, due))
            else:
                self._begin(number, due)
            self._push_arrival()

        self._push(self._start + offset, arrive)

    def _begin_next(self, due: float) -> None:
        """Begin the next session of a closed loop."""
        if due >= self._deadline:
            return
        number = self._ahead.popleft() if self._ahead else next(self._numbers, None)
        if number is not None:
            self._begin(number, due)
            if not self._warmup:
                self._loop.call_soon(self._render_ahead)

    def _render_ahead(self) -> None:
        """Render the payload of a session to come while the server works."""
        number = next(self._numbers, None) if len(self._ahead) < RENDER_AHEAD else None
        if number is not None:
            self._rendered_session(number)
            self._ahead.append(number)

    def _rendered_session(self, number: int) -> tuple[Session, bytes]:
        entry = self._rendered.get(number)
        if entry is None:
            session = self._source.session(number)
            entry = self._rendered[number] = session, self._renderer.payload(session.turns[0])
        return entry

    def _begin(self, number: int, due: float) -> None:
        if self._warmup:
            session = self._source.warmup(number)
            payload = self._renderer.payload(session.turns[0])
        else:
            session, payload = self._rendered_session(number)
            self._rendered.pop(number, None)
        self._sessions += 1
        self._send(ActiveRequest(self._settings.streaming, self._keep_text, number, session, 0, due), payload)

    def _send(self, request: ActiveRequest, payload: bytes) -> None:
        self._active.add(request)
        self.sent += 1
        self._client.send(request, payload)

    def _on_end(self, request: ActiveRequest) -> None:
        self._active.discard(request)
        if self._stopped:
            return
        record = self._record(request)
        self._records.append(record)
        self.done += 1
        self.finished_tokens += record.output_tokens
        self.failed += record.error is not None
        if self.failed == self.done >= HOPELESS:
            self.fault = f"the first {self.done} requests all failed: {record.error}"
            self.stop()
            return
        if record.error is None and request.turn + 1 < len(request.session.turns):
            due = record.end + self._settings.think_s
            if due < self._deadline:
                tokens = (record.input_tokens or 0) + (record.output_tokens if self._text_prompts else 0)
                self._push(due, lambda due: self._send_turn(request, tokens, due))
                self._arm()
                return
        self._end_session()

    def _send_turn(self, before: ActiveRequest, history_tokens: int, due: float) -> None:
        turn = ActiveRequest(
            self._settings.streaming, self._keep_text, before.index, before.session, before.turn + 1, due
        )
        turn.history = (*before.history, (before.request.prompt, before.reader.text or ""))
        turn.history_tokens = history_tokens
        self._send(turn, self._renderer.payload(turn.request, turn.history))

    def _end_session(self) -> None:
        self._sessions -= 1
        now = perf_counter()
        if self._waiting:
            number, due = self._waiting.popleft()
            self._begin(number, due)
        elif not self._settings.is_open_loop or self._warmup:
            self._begin_next(now)
        self._check_finished()

    def _check_finished(self) -> None:
        if not self._sessions and not self._heap and not self._waiting:
            self._finished.set()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            self._client.expire(perf_counter())

    def _record(self, request: ActiveRequest) -> Record:
        reader, usage = request.reader, request.reader.usage
        text = reader.text
        client_tokens = None
        if text is not None and self._source.tokenizer is not None and request.error is None:
            client_tokens = self._writer.count(text, special=False)
        if usage.output_tokens is not None:
            output, counted_by = usage.output_tokens, "usage"
        elif client_tokens is not None:
            output, counted_by = client_tokens, "tokenizer"
        elif self._settings.streaming:
            output, counted_by = len(reader.token_times), "chunks"
        else:
            output, counted_by = 0, "nobody"
        expected = request.request.input_tokens
        input_tokens = usage.input_tokens
        if input_tokens is None and expected is not None:
            input_tokens = expected + request.history_tokens
        assert request.end is not None
        return Record(
            request.index, request.turn, request.scheduled, request.sent, request.first_byte, reader.first_token,
            reader.token_times, request.end,
            input_tokens, output, request.request.output_tokens, usage.cached_tokens,
            request.history_tokens or request.request.cacheable_tokens, counted_by, client_tokens, reader.finish,
            request.error, self._warmup,
        )  # fmt: skip
