"""A lean client that keeps a number of streams open and does no more per chunk than count it.

    outcome = run_client("127.0.0.1", 8000, bodies, streams=256, processes=2)

Each stream is one connection that sends the next request when the last one has ended.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from typing import Any

RESPONSE_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass
class ClientOutcome:
    """Times of all requests, on the clock that all processes share."""

    times: list[tuple[float, float, float]] = field(default_factory=list)  # sent, first token, end
    chunks: int = 0

    @property
    def seconds(self) -> float:
        return max(ended for _, _, ended in self.times) - min(sent for sent, _, _ in self.times)

    def ttft_s(self, skip: int) -> list[float]:
        """Return the times to first token, without the requests that were sent first, which came all at once."""
        return [first - sent for sent, first, _ in sorted(self.times)[skip:]]


class _Stream(asyncio.Protocol):
    """One connection."""

    def __init__(self, requests: list[bytes], outcome: ClientOutcome, done: "asyncio.Future[None]"):
        self._requests, self._outcome, self._done = requests, outcome, done
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send_next()

    def _send_next(self) -> None:
        if not self._requests:
            self._transport.close()
            return
        self._first = 0.0
        self._sent = time.monotonic()
        self._transport.write(self._requests.pop())

    def data_received(self, data: bytes) -> None:
        count = data.count(b'"text":')
        if count and not self._first:
            self._first = time.monotonic()
        self._outcome.chunks += count
        self._tail = (self._tail + data)[-len(RESPONSE_END) :]
        if self._tail == RESPONSE_END:
            self._outcome.times.append((self._sent, self._first, time.monotonic()))
            self._tail = b""
            self._send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def _run(host: str, port: int, requests: list[bytes], streams: int) -> ClientOutcome:
    outcome, loop = ClientOutcome(), asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(streams)]
    for done in futures:
        await loop.create_connection(lambda done=done: _Stream(requests, outcome, done), host, port)  # type: ignore[misc]
    await asyncio.gather(*futures)
    return outcome


def _run_process(host: str, port: int, bodies: Sequence[bytes], streams: int) -> ClientOutcome:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    requests = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in reversed(bodies)]
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_run(host, port, requests, streams))
    return uvloop.run(_run(host, port, requests, streams))


def run_client(host: str, port: int, bodies: Sequence[bytes], streams: int, processes: int = 1) -> ClientOutcome:
    """Send all bodies over so many streams; return the times."""
    shares = [(bodies[i::processes], len(range(i, streams, processes))) for i in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(_run_process, *zip(*((host, port, b, s) for b, s in shares), strict=True)))
    times = list(chain.from_iterable(outcome.times for outcome in outcomes))
    return ClientOutcome(times, sum(outcome.chunks for outcome in outcomes))
