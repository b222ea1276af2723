"""A file that is read once, from its beginning to its end: its bytes go where they are needed, and into its checksum.

    with FileStream(path, "interleaved_sums") as stream:
        stream.copy_to(offset, memory)      # offsets ascend; what lies between is read too
        stream.checksum()                   # reads the rest

A thread reads ahead, so the disk and the copies overlap. It also sums a block, which is still in its cache, if another
waits to be copied; else the copying thread, which would wait, does: two cores share reads, sums and copies evenly.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from llmb.runtime.checksums.file_checksum import ALGORITHMS, Bytes, FileChecksum, fill

AHEAD = 4  # blocks being read or waiting, beside the one that is copied from: they stay in a shared cache


class FileStream:
    """Reader of a whole file in order, which two threads share."""

    def __init__(self, path: Path, algorithm: str):
        self._path, self._file, self._checksum = path, FileIO(path), ALGORITHMS[algorithm]()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums")
        self._waiting: deque[tuple[Bytes, Future[tuple[int, Any]]]] = deque()
        self._taken = 0  # blocks, which are numbered from 0
        self._block, self._start, self._end = self._new_buffer(), 0, 0  # bytes of the file in it
        for _ in range(AHEAD):
            self._read_ahead(self._new_buffer())

    def copy_to(self, offset: int, memory: Bytes) -> None:
        """Copy bytes from an offset of the file; raise OSError if it ends before them or cannot be read."""
        if offset < self._start:
            raise ValueError(f"{self._path}: bytes at {offset} were read before those at {self._start}")
        copied = 0
        while copied < len(memory):
            while offset >= self._end:
                if not self._next_block():
                    raise OSError(f"{self._path} ends at byte {self._end:,}")
            begin = offset - self._start
            count = min(self._end - offset, len(memory) - copied)
            memory[copied : copied + count] = self._block[begin : begin + count]
            copied, offset = copied + count, offset + count

    def checksum(self) -> FileChecksum:
        """Read to the end of the file, and return the checksum of all that was read."""
        while self._next_block():
            pass
        return self._checksum.result()

    def _next_block(self) -> bool:
        """Go on to the next block, and return whether there is one."""
        block, reading = self._waiting[0]
        count, sums = reading.result()
        if not count:
            return False
        self._waiting.popleft()
        self._taken += 1
        self._read_ahead(self._block)
        self._checksum.add(self._checksum.sums(block, count) if sums is None else sums)
        self._block, self._start, self._end = block, self._end, self._end + count
        return True

    def _new_buffer(self) -> Bytes:
        return np.empty(self._checksum.buffer_bytes, dtype=np.uint8)

    def _read_ahead(self, buffer: Bytes) -> None:
        number = self._taken + len(self._waiting)
        self._waiting.append((buffer, self._reader.submit(self._read_block, number, buffer)))

    def _read_block(self, number: int, buffer: Bytes) -> tuple[int, Any]:
        """Return the bytes read, and their sums unless the copying thread has nothing else to do."""
        count = fill(self._file, buffer)
        return count, None if number == self._taken else self._checksum.sums(buffer, count)

    def __enter__(self) -> "FileStream":
        return self

    def __exit__(self, _type: type | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._file.close()
