"""Incremental parser of HTTP/1.1 responses: bytes in, body bytes out, whatever the sizes of the reads.

    parser = ResponseParser()
    body = parser.feed(data)          # b"" or more of the body
    parser.complete, parser.status, parser.keep_alive

It is hand-written because reading is the hottest loop of the client: one pass over a read takes a few microseconds
in Python, and a load generator needs neither cookies nor compression nor redirects.
"""

MAX_HEAD_BYTES = 65_536
NO_BODY = (204, 304)
MAX_SIZES = 4096
_SIZES: dict[bytes, int] = {}  # by the lines that state them: chunks of a stream have few different sizes


class HttpError(Exception):
    """Bytes that are no HTTP/1.1 response."""


class ResponseParser:
    """Parses one response after the other; call `reset` between them."""

    __slots__ = ("_buffer", "_chunked", "_in_trailer", "_remaining", "complete", "headers", "keep_alive", "status")

    def __init__(self) -> None:
        self._buffer = b""
        self.reset()

    def reset(self) -> None:
        """Expect another response; bytes left over from the last one would belong to it."""
        self.status = 0  # until the head is complete
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.keep_alive = True
        self._chunked = False
        self._in_trailer = False
        self._remaining: int | None = None  # bytes of the body or of the current chunk; None: until the end

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body that this read completes."""
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        while not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise HttpError("the head of the response does not end")
                self._buffer = data
                return b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self.complete:
            self._buffer = data
            return b""
        return self._read_chunks(data) if self._chunked else self._read_plain(data)

    def end(self) -> bool:
        """Note that the connection was closed; return whether the response is whole."""
        if self.status and not self._chunked and self._remaining is None:
            self.complete = True
        return self.complete

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        version, _, status_text = lines[0].partition(b" ")
        if not version.startswith(b"HTTP/1.") or not status_text[:3].isdigit():
            raise HttpError(f"expected an HTTP/1.1 response, got {lines[0][:60]!r}")
        status = int(status_text[:3])
        if 100 <= status < 200:  # an interim response: the real one follows
            return
        self.status = status
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip()
        headers = self.headers
        connection = headers.get(b"connection", b"").lower()
        self.keep_alive = connection != b"close" if version == b"HTTP/1.1" else connection == b"keep-alive"
        if headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._chunked = True
        elif b"content-length" in headers:
            try:
                self._remaining = int(headers[b"content-length"])
            except ValueError as error:
                raise HttpError(f"Content-Length {headers[b'content-length'][:20]!r} is not a number") from error
        if status in NO_BODY or (self._remaining == 0 and not self._chunked):
            self.complete = True
        elif not self._chunked and self._remaining is None:
            self.keep_alive = False  # the end of the connection ends the body

    def _read_plain(self, data: bytes) -> bytes:
        if self._remaining is None:
            return data
        body = data[: self._remaining]
        self._remaining -= len(body)
        if not self._remaining:
            self.complete = True
            self._buffer = data[len(body) :]
        return body

    def _read_chunks(self, data: bytes) -> bytes:
        parts: list[bytes] = []
        position, length = 0, len(data)
        remaining = self._remaining  # of the current chunk with its line end; None: a size line follows
        sizes, find = _SIZES, data.find
        while position < length:
            if remaining is None:
                if self._in_trailer:
                    position = self._read_trailer(data, position)
                    break
                line_end = find(b"\r\n", position)
                if line_end < 0:
                    if length - position > MAX_HEAD_BYTES:
                        raise HttpError("the size of a chunk does not end")
                    break
                line = data[position:line_end]
                size = sizes.get(line)
                if size is None:
                    size = _chunk_size(line)
                position = line_end + 2
                if size == 0:
                    self._in_trailer = True
                    continue
                end = position + size
                if end + 2 <= length:  # the whole chunk is here: the usual case
                    parts.append(data[position:end])
                    position = end + 2
                    continue
                remaining = size + 2
            end = position + remaining
            if end <= length:
                if remaining > 2:
                    parts.append(data[position : end - 2])
                position, remaining = end, None
            else:
                content = max(0, min(length - position, remaining - 2))
                if content:
                    parts.append(data[position : position + content])
                remaining -= length - position
                position = length
        self._remaining = remaining
        self._buffer = data[position:]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_trailer(self, data: bytes, position: int) -> int:
        """Skip trailers up to the empty line that ends the body."""
        while True:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                return position
            empty = line_end == position
            position = line_end + 2
            if empty:
                self.complete = True
                return position


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        size = int(digits, 16)
    except ValueError as error:
        raise HttpError(f"expected the size of a chunk, got {line[:40]!r}") from error
    if size < 0 or digits[:1] in (b"+", b"-") or b"_" in digits:
        raise HttpError(f"expected the size of a chunk, got {line[:40]!r}")
    if len(_SIZES) < MAX_SIZES:
        _SIZES[line] = size
    return size
