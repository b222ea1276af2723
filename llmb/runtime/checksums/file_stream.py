"""A file that is read once, from its beginning to its end: its bytes go where they are needed, and into its checksum.

    with FileStream(path, "xxh3_blocks") as stream:
        stream.copy_to(offset, memory)      # offsets ascend; what lies between is read too
        stream.read()                       # now the bytes are there
        stream.checksum()                   # reads the rest

Threads share the blocks. Each reads one, hashes it and copies it while it is in the cache of its core, and none of the
three holds the interpreter.
"""

import os
from bisect import bisect_left, bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from llmb.runtime.checksums.file_checksum import ALGORITHMS, Bytes, FileChecksum

THREADS = 4  # more do not read faster, and other ranks have theirs
BLOCKS_AT_ONCE = 64  # whose partial results are added together, in the order of the file


class FileStream:
    """Reader of a whole file in order, block by block, in several threads."""

    def __init__(self, path: Path, algorithm: str):
        self._path, self._checksum = path, ALGORITHMS[algorithm]()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size, self._block_bytes = os.fstat(self._descriptor).st_size, self._checksum.buffer_bytes
        threads = min(THREADS, len(os.sched_getaffinity(0)))
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="checksums")
        self._buffers = [np.empty(self._block_bytes, dtype=np.uint8) for _ in range(threads)]
        self._starts: list[int] = []  # of copies that `read` is to make
        self._targets: list[Bytes] = []
        self._blocks = 0  # that were read
        self._last = self._buffers[0][:0]  # bytes of the last of them: what follows may need its end

    def copy_to(self, offset: int, memory: Bytes) -> None:
        """Let `read` copy bytes from an offset of the file, which is not below that of an earlier copy."""
        last = max(0, self._blocks - 1) * self._block_bytes
        if offset < (self._starts[-1] if self._starts else last):
            raise ValueError(f"{self._path}: bytes at {offset} were read before those that follow them")
        if offset + len(memory) > self._size:
            raise OSError(f"{self._path} ends at byte {self._size:,}")
        ready = self._last[offset - last :][: len(memory)]
        memory[: len(ready)] = ready
        if len(memory) > len(ready):
            self._starts.append(offset + len(ready))
            self._targets.append(memory[len(ready) :])

    def read(self) -> None:
        """Read as far as copies need it."""
        if self._starts:
            self._read_blocks(self._starts[-1] + len(self._targets[-1]))
            self._starts, self._targets = [], []

    def checksum(self) -> FileChecksum:
        """Read to the end of the file, and return the checksum of all that was read."""
        self._read_blocks(self._size)
        return self._checksum.result()

    def _read_blocks(self, end: int) -> None:
        """Read the blocks that begin before an offset."""
        stop, threads = -(-end // self._block_bytes), len(self._buffers)
        while self._blocks < stop:
            numbers = range(self._blocks, min(stop, self._blocks + BLOCKS_AT_ONCE))
            work = [
                self._workers.submit(self._read, numbers[n::threads], buffer) for n, buffer in enumerate(self._buffers)
            ]
            blocks = [worker.result() for worker in work]
            for n in range(len(numbers)):
                self._last, partial_result = blocks[n % threads][n // threads]
                self._checksum.add(partial_result)
            self._blocks = numbers.stop

    def _read(self, numbers: range, buffer: Bytes) -> list[tuple[Bytes, Any]]:
        """Read, hash and copy blocks through a buffer; return its part that each filled, and their partial results."""
        blocks = []
        for number in numbers:
            start = number * self._block_bytes
            block = buffer[: self._fill(buffer, start)]
            blocks.append((block, self._checksum.partial_result(buffer, len(block))))
            self._copy(start, block)
        return blocks

    def _fill(self, buffer: Bytes, offset: int) -> int:
        """Read from an offset until the buffer is full or the file ends; return the bytes read."""
        filled, view = 0, buffer.data
        while filled < len(view) and (count := os.preadv(self._descriptor, [view[filled:]], offset + filled)):
            filled += count
        return filled

    def _copy(self, start: int, block: Bytes) -> None:
        """Copy what is needed of a block."""
        end = start + len(block)
        for index in range(max(bisect_right(self._starts, start) - 1, 0), bisect_left(self._starts, end)):
            offset, target = self._starts[index], self._targets[index]
            first, last = max(offset, start), min(offset + len(target), end)
            if first < last:
                target[first - offset : last - offset] = block[first - start : last - start]

    def __enter__(self) -> "FileStream":
        return self

    def __exit__(self, _type: type | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._workers.shutdown(cancel_futures=True)
        os.close(self._descriptor)


def file_checksum(path: Path, algorithm: str) -> FileChecksum:
    """Read a file and return its checksum."""
    with FileStream(path, algorithm) as stream:
        return stream.checksum()
