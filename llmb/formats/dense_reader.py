"""Files without their holes: a crash or an attacker can leave gigabytes of nothing in an event file or a log.

    with open_dense(path) as file: file.readline(65536)
    for line in read_lines(path, limit=65536): ...

A hole is read as one zero byte, which no event and no number contains: what it interrupts stays damaged, and reading
takes time for what is stored alone. Positions (`seek`, `tell`) are those of the file.
"""

import errno
import os
from collections.abc import Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from llmb.config.serialization import open_regular_file
from llmb.errors import ConfigError

BLOCK_BYTES = 256 << 10


def open_dense(path: Path) -> BufferedReader:
    """Open a regular file for reading without its holes."""
    return BufferedReader(DenseReader(open_regular_file(path, buffering=0)), BLOCK_BYTES)


def read_lines(path: Path, limit: int) -> Iterator[bytes]:
    """Yield the lines of a file, none of a missing one; raise ConfigError if it cannot be read.

    Of a line longer than the limit only the beginning, which nothing can parse, and of a hole a zero byte.
    """
    try:
        with open_dense(path) as lines:
            while line := lines.readline(limit):
                yield line
                if len(line) == limit and not line.endswith(b"\n"):
                    _skip_line(lines)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _skip_line(lines: BufferedReader) -> None:
    """Move behind the end of the line, without building it."""
    while block := lines.peek():
        if end := block.find(b"\n") + 1:
            lines.read(end)
            return
        lines.read(len(block))


class DenseReader(RawIOBase):
    """Unbuffered content of a file, of each hole one zero byte."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any, /) -> int:
        if not len(buffer):
            return 0
        begin, data = self.tell(), self._next_data()
        if data > begin:
            buffer[:1] = b"\0"
            return 1
        return int(self._file.readinto(buffer))  # type: ignore[attr-defined]

    def _next_data(self) -> int:
        """Move to the next byte that is stored, or to the end of the file; return its position."""
        begin = self.tell()
        try:
            return os.lseek(self.fileno(), begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the file system knows no holes
                return begin
        return self.seek(max(begin, os.fstat(self.fileno()).st_size))  # nothing is stored from here to the end


def start_of_stored(descriptor: int, count: int) -> int:
    """Return where the last stored bytes of a file start, this many without its holes."""
    size = os.fstat(descriptor).st_size
    extents, end = [], 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the file system knows no holes
                extents = [(0, size)]
            break
        extents.append((begin, end))
    start = size
    for begin, end in reversed(extents):
        start = max(begin, end - count)
        count -= end - start
        if not count:
            break
    return start
