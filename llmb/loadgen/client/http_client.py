"""HTTP/1.1 client for many requests at once: one protocol object per connection, no task per request.

    client = HttpClient(loop, Target.from_url("http://localhost:8000"), on_end)
    client.send(exchange, payload)           # returns at once; on_end(exchange) is called when it has ended

Connections are reused; nothing is retried. Time stamps are taken when bytes are read. Every failure ends the exchange
with a named error and never raises. Measured against aiohttp in bench/loadgen.py.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

from llmb.loadgen.client.http_response import HttpError, ResponseParser
from llmb.loadgen.client.openai_stream import ResponseReader, error_text
from llmb.loadgen.client.sse import SseParser

MAX_ERROR_BYTES = 65_536
HEADERS_OF_CONTENT = (b"content-encoding", b"content-type")


@dataclass(frozen=True)
class Target:
    """Host, port and path prefix of a server."""

    host: str
    port: int
    tls: bool
    path: str  # before /v1
    netloc: str

    @classmethod
    def from_url(cls, url: str) -> "Target":
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        netloc = parts.netloc.rpartition("@")[2]
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"), netloc)

    def head(self, route: str, api_key: str | None, method: str = "POST") -> bytes:
        """Return the request line and the headers that are the same for every request, without the last line end."""
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        head = f"{method} {self.path}{route} HTTP/1.1\r\nHost: {self.netloc}\r\nAccept: */*\r\n{key}"
        return head.encode("latin-1", errors="replace")


class Exchange:
    """One request on the wire and what came back."""

    __slots__ = ("body", "end", "error", "first_byte", "reader", "sent", "sse", "status")

    def __init__(self, streaming: bool, keep_text: bool = False):
        self.reader = ResponseReader(keep_text)
        self.sse: SseParser | None = SseParser() if streaming else None
        self.body: list[bytes] = []  # of a response that is no stream
        self.sent = 0.0
        self.first_byte: float | None = None
        self.end: float | None = None
        self.status = 0
        self.error: str | None = None


class Connection(asyncio.Protocol):
    """One connection, idle or with one exchange."""

    __slots__ = ("_client", "_parser", "exchange", "transport")

    def __init__(self, client: "HttpClient"):
        self._client = client
        self._parser = ResponseParser()
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        exchange, parser = self.exchange, self._parser
        if exchange is None:  # nothing was asked
            self.close()
            return
        if exchange.first_byte is None:
            exchange.first_byte = now
        try:
            body = parser.feed(data)
        except HttpError as error:
            self._finish(now, f"bad response: {error}")
            return
        if body:
            if exchange.sse is not None and parser.status == 200:
                block = exchange.sse.feed_block(body)
                if block:
                    exchange.reader.block(block, now)
            else:
                exchange.body.append(body)
        if parser.complete:
            self._finish(now)

    def eof_received(self) -> None:
        return None  # connection_lost follows

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._client.forget(self)
        if self.exchange is None:
            return
        now = perf_counter()
        if self._parser.end():
            self._finish(now)
            return
        begun = self.exchange.first_byte is not None
        reason = f": {error}" if error else ""
        failure = f"truncated: the connection ended in the response{reason}" if begun else f"disconnected{reason}"
        self._finish(now, failure)

    def abort(self, error: str) -> None:
        """End the exchange and the connection."""
        if self.exchange is not None:
            self._finish(perf_counter(), error)
        self.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _finish(self, now: float, error: str | None = None) -> None:
        exchange, parser = self.exchange, self._parser
        assert exchange is not None
        self.exchange = None
        exchange.status = parser.status
        if error is None:
            error = self._read_end(exchange, now)
        reader = exchange.reader
        exchange.error = error
        last = reader.token_times[-1] if reader.token_times else None
        exchange.end = last if last is not None and error is None else now  # not [DONE], nor the usage chunk
        if parser.complete and parser.keep_alive and self.transport is not None:
            parser.reset()
            self._client.release(self)
        else:
            self.close()
        self._client.on_end(exchange)

    def _read_end(self, exchange: Exchange, now: float) -> str | None:
        """Read what is complete only at the end of the response; return its error, if it is one."""
        status, reader = self._parser.status, exchange.reader
        if status != 200:
            body = b"".join(exchange.body)[:MAX_ERROR_BYTES]
            try:
                return f"http {status}: {error_text(json.loads(body))}"
            except ValueError:
                return f"http {status}: {error_text(body.decode(errors='replace')) or 'no body'}"
        if exchange.sse is None:
            reader.whole(b"".join(exchange.body), now)
        else:
            unfinished = exchange.sse.unfinished if reader.first_token is None else b""
            if events := exchange.sse.end():
                reader.events(events, now)
            if not reader.done and reader.finish is None and reader.error is None:
                begun = reader.first_token is not None
                return "truncated: the stream ended without [DONE]" if begun else self._not_a_stream(unfinished)
        return reader.failure()

    def _not_a_stream(self, body: bytes) -> str:
        """Return what came where a stream was asked for, and had no text."""
        headers = self._parser.headers
        encoding, content_type = (headers.get(name, b"").lower().decode("latin-1") for name in HEADERS_OF_CONTENT)
        if encoding not in ("", "identity"):
            return f"bad response: compressed ({encoding}), which was not asked for"
        if not body.strip() or content_type.startswith("text/event-stream"):
            return "truncated: the stream ended without [DONE]"
        with suppress(ValueError, RecursionError):
            content = json.loads(body)
            if isinstance(content, dict) and "choices" not in content:
                return f"error response: {error_text(content)}"
        return f"bad response: no stream of events but {content_type or 'no Content-Type'}; --no-stream reads it whole"


class HttpClient:
    """Pool of connections to one server."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        target: Target,
        on_end: Callable[[Exchange], None],
        timeout_s: float = 600.0,
    ):
        self._loop, self._target, self.on_end, self._timeout_s = loop, target, on_end, timeout_s
        self._address = target.host  # or one of its IP addresses, once it is resolved
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._tls = ssl.create_default_context() if target.tls else None

    async def open(self, count: int) -> None:
        """Open idle connections, so that the first requests need not; failures are left to the requests."""

        async def connect() -> None:
            with suppress(OSError, asyncio.TimeoutError):
                self._idle.append(await self._connect())

        await self._resolve()
        for first in range(0, count, 64):  # not more at once than a usual listen queue holds
            await asyncio.gather(*(connect() for _ in range(first, min(count, first + 64))))

    def send(self, exchange: Exchange, payload: bytes) -> None:
        """Send a request on an idle connection, or open one."""
        exchange.sent = perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                connection.exchange = exchange
                connection.transport.write(payload)
                return
        task = self._loop.create_task(self._send_on_new(exchange, payload))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _send_on_new(self, exchange: Exchange, payload: bytes) -> None:
        try:
            connection = await self._connect()
        except (TimeoutError, OSError) as error:
            exchange.end = perf_counter()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            exchange.error = f"connect: {reason}"
            self.on_end(exchange)
            return
        connection.exchange = exchange
        assert connection.transport is not None
        connection.transport.write(payload)

    async def _resolve(self) -> None:
        """Look the host up once, not for every connection, and take the first of its addresses that responds."""
        target = self._target
        with suppress(OSError, asyncio.TimeoutError):
            infos = await self._loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            for address in dict.fromkeys(str(info[4][0]) for info in infos):
                self._address = address
                with suppress(OSError, asyncio.TimeoutError):
                    self._idle.append(await self._connect())
                    return
        self._address = target.host

    async def _connect(self) -> Connection:
        target = self._target
        name = target.host if target.tls else None
        _, protocol = await asyncio.wait_for(
            self._loop.create_connection(
                lambda: Connection(self), self._address, target.port, ssl=self._tls, server_hostname=name
            ),
            timeout=self._timeout_s,
        )
        self._connections.add(protocol)
        return protocol

    def release(self, connection: Connection) -> None:
        """Take back a connection whose exchange has ended."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that was lost."""
        self._connections.discard(connection)

    def expire(self, now: float) -> None:
        """End exchanges that exceed the timeout; to be called now and then."""
        limit = now - self._timeout_s
        for connection in [c for c in self._connections if c.exchange is not None and c.exchange.sent < limit]:
            connection.abort(f"timeout: no end within {self._timeout_s:g} s")

    def abort_all(self, error: str) -> None:
        """End all exchanges in progress."""
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._connections):
            connection.abort(error)

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._connections):
            connection.exchange = None
            connection.close()
