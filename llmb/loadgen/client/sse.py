"""Incremental parser of server-sent events (SSE): body bytes in, data of complete events out.

    parser.feed(b'data: {"a": 1}\\n\\ndata: [DO') -> [b'{"a": 1}']

Lines may end in LF, CRLF or CR and be split anywhere; comments and fields other than `data` are skipped.
"""


class SseParser:
    """Splits a stream into the data of its events."""

    __slots__ = ("_buffer", "_cr_pending")

    def __init__(self) -> None:
        self._buffer = b""
        self._cr_pending = False  # the last read ended in CR: an LF that follows belongs to it

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of all events that these bytes complete."""
        return split_events(self.feed_block(data))

    def feed_block(self, data: bytes) -> bytes:
        """Return all events that these bytes complete, undivided, with line ends as LF."""
        if self._cr_pending and data:
            data = data[1:] if data[:1] == b"\n" else data
            self._cr_pending = False
        if b"\r" in data:
            self._cr_pending = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._buffer:
            data = self._buffer + data
        end = data.rfind(b"\n\n")
        if end < 0:
            self._buffer = data
            return b""
        self._buffer = data[end + 2 :]
        return data[:end]

    @property
    def unfinished(self) -> bytes:
        """Bytes after the last complete event."""
        return self._buffer

    def end(self) -> list[bytes]:
        """Return the data of an event that the stream ended in the middle of."""
        content = _data_of(self._buffer)
        self._buffer = b""
        return [] if content is None else [content]


def split_events(block: bytes) -> list[bytes]:
    """Return the data of each event of a block."""
    results = []
    for event in block.split(b"\n\n"):
        if event[:6] == b"data: " and event.find(b"\n") < 0:
            results.append(event[6:])
        elif (content := _data_of(event)) is not None:
            results.append(content)
    return results


def _data_of(event: bytes) -> bytes | None:
    """Return the data lines of an event, joined; None if it has none."""
    lines = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[6:] if line[5:6] == b" " else line[5:])
    return b"\n".join(lines) if lines else None
