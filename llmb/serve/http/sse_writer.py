"""Server-sent events on a connection: one transport write a chunk, and a bounded buffer for slow readers.

While the client does not read, its transport's buffer fills up to HIGH_WATER_BYTES and nothing more is written: text
waits in the output, where the tokens of many steps become one chunk. A client that reads nothing at all for the stall
timeout is disconnected, which cancels its requests.
"""

import asyncio
import time

from aiohttp import web

HIGH_WATER_BYTES = 64 * 1024
POLL_S = 0.02  # between two looks at the buffer of a slow reader, at the end of its output
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class SseWriter:
    """Stream of one response. aiohttp writes its head and its end, this class everything between."""

    def __init__(self, request: web.Request, stall_timeout_s: float):
        self._request = request
        self.response = web.StreamResponse(headers=HEADERS)
        self.response.enable_chunked_encoding()
        self._stall_timeout_s = stall_timeout_s
        self._transport: asyncio.Transport | None = None
        self._unread = 0  # bytes in the transport's buffer when it was last seen full
        self._stalled_since = 0.0
        self.chunks = 0

    async def open(self) -> None:
        """Send the head of the response."""
        await self.response.prepare(self._request)
        self._transport = self._request.transport

    def is_writable(self) -> bool:
        """Return whether the client keeps up; disconnect one that has read nothing for too long."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        unread = transport.get_write_buffer_size()
        if unread <= HIGH_WATER_BYTES:
            self._unread = 0
            return True
        now = time.monotonic()
        if not self._unread or unread < self._unread:
            self._unread, self._stalled_since = unread, now
        elif now - self._stalled_since > self._stall_timeout_s:
            transport.abort()
        return False

    def write(self, event: str) -> None:
        """Write one event, which is ASCII, as a chunk of the chunked encoding."""
        assert self._transport is not None
        self.chunks += 1
        self._transport.write(f"{len(event):x}\r\n{event}\r\n".encode("ascii"))

    async def wait_writable(self) -> None:
        """Wait until the client has read enough; raise ConnectionError if it is gone."""
        while not self.is_writable():
            if self._transport is None or self._transport.is_closing():
                raise ConnectionError
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """End the response; a client that does not read its end is disconnected."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self.response.write_eof()
        except TimeoutError:
            assert self._transport is not None
            self._transport.abort()
