"""Checksum of a file: XXH3-64 of each 2 MiB of it, and XXH3-64 of these hashes in their order.

    hashes = BlockHashes()
    hashes.add(hashes.partial_result(buffer, count))    # block after block; any thread may compute the partial results
    hashes.result() -> FileChecksum(bytes=1_496_000_128, digest=0x91c5...)

It misses one of 2^64 changes, whichever: it is for errors of a disk or a transfer, not for attacks. XXH3 takes little
longer than the reading of the bytes from a cache, and does not hold the interpreter (`bench/checkpoint_load.py`).
Checkpoints of older versions have other checksums, which are checked all the same. Where the package xxhash is not
installed, checkpoints are written with the newest of these, which need numpy alone.
"""

import zlib
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np

from llmb.errors import ConfigError

try:
    import xxhash
except ImportError:  # the engine runs from its source folder, in an environment that it was not installed into
    xxhash = None  # type: ignore[assignment]

HASHED_BYTES = 1 << 21  # a block: fits a cache, and threads do not wait for the interpreter often

SUMS = 2053
SUMMED_BYTES = 512 * SUMS  # 64 words of each sum
MULTIPLIER, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)  # odd: no bit of the state is lost
ROW_WORDS = 8192  # of word sums
ROW_BYTES = 8 * ROW_WORDS

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]


class FileChecksum(NamedTuple):
    """Size and checksum of a file."""

    bytes: int
    digest: int


class Checksum(Protocol):
    """A checksum of bytes that are added in their order."""

    buffer_bytes: int  # about 2 MiB: they stay in a cache between the read and the copy

    def partial_result(self, buffer: Bytes, count: int) -> Any:
        """Return what `add` needs of the first bytes of a buffer, which is full except at the end of the file."""

    def add(self, partial_result: Any) -> None:
        """Add the next bytes."""

    def result(self) -> FileChecksum:
        """Return size and digest of what was added."""


class BlockHashes:
    """XXH3-64 of the hashes of all blocks."""

    buffer_bytes = HASHED_BYTES

    def __init__(self) -> None:
        if xxhash is None:
            raise ConfigError("the files of this checkpoint have XXH3 checksums: pip install xxhash, then resume")
        self._hashes, self._size = xxhash.xxh3_64(), 0

    def partial_result(self, buffer: Bytes, count: int) -> tuple[int, bytes]:
        return count, xxhash.xxh3_64_digest(buffer[:count].data)

    def add(self, partial_result: tuple[int, bytes]) -> None:
        count, digest = partial_result
        self._size += count
        self._hashes.update(digest)

    def result(self) -> FileChecksum:
        return FileChecksum(self._size, self._hashes.intdigest())


class InterleavedSums:
    """2,053 sums of words, where word i of a block adds to sum i mod 2,053.

    A block is 2,053 sectors of 512 bytes: that is a prime, so of any two sectors that change places the words change
    sums. All sums are multiplied from block to block, so blocks have an order.
    """

    buffer_bytes = 2 * SUMMED_BYTES

    def __init__(self) -> None:
        self._state, self._size = np.zeros(SUMS, dtype=np.uint64), 0

    def partial_result(self, buffer: Bytes, count: int) -> tuple[int, Words]:
        words = _words(buffer, count, SUMMED_BYTES).reshape(-1, SUMMED_BYTES // (8 * SUMS), SUMS)
        return count, np.add.reduce(words, axis=1)

    def add(self, partial_result: tuple[int, Words]) -> None:
        count, blocks = partial_result
        self._size += count
        state = self._state
        for block in blocks:
            state ^= state >> SHIFT
            state *= MULTIPLIER
            state += block

    def result(self) -> FileChecksum:
        content = self._state.astype("<u8").tobytes() + self._size.to_bytes(8, "little")
        return FileChecksum(self._size, int.from_bytes(blake2b(content, digest_size=8).digest(), "little"))


class WordSums:
    """Sums of words by row of 64 KiB and by column, as checkpoints of still older versions have them."""

    buffer_bytes = 32 * ROW_BYTES

    def __init__(self) -> None:
        self._columns = np.zeros(ROW_WORDS, dtype=np.uint64)
        self._digest, self._size = blake2b(digest_size=8), 0

    def partial_result(self, buffer: Bytes, count: int) -> tuple[int, Words, Words]:
        rows = _words(buffer, count, ROW_BYTES).reshape(-1, ROW_WORDS)
        return count, np.add.reduce(rows, axis=0), np.add.reduce(rows, axis=1)

    def add(self, partial_result: tuple[int, Words, Words]) -> None:
        count, columns, rows = partial_result
        self._size += count
        self._columns += columns
        self._digest.update(rows.astype("<u8").tobytes())

    def result(self) -> FileChecksum:
        digest = self._digest.copy()
        digest.update(self._columns.astype("<u8").tobytes() + self._size.to_bytes(8, "little"))
        return FileChecksum(self._size, int.from_bytes(digest.digest(), "little"))


class Crc32:
    """CRC-32, as the first checkpoints with checksums have it."""

    buffer_bytes = 1 << 21

    def __init__(self) -> None:
        self._crc = self._size = 0

    def partial_result(self, buffer: Bytes, count: int) -> bytes:
        return buffer[:count].tobytes()  # which cannot be summed apart from what lies before

    def add(self, partial_result: bytes) -> None:
        self._crc, self._size = zlib.crc32(partial_result, self._crc), self._size + len(partial_result)

    def result(self) -> FileChecksum:
        return FileChecksum(self._size, self._crc)


ALGORITHMS: dict[str, type[Checksum]] = {  # by their name in checkpoint.json
    "xxh3_blocks": BlockHashes, "interleaved_sums": InterleavedSums, "word_sums": WordSums, "crc32": Crc32,
}  # fmt: skip
ALGORITHM = "interleaved_sums" if xxhash is None else "xxh3_blocks"  # of the checkpoints that are written


def _words(buffer: Bytes, count: int, unit: int) -> Words:
    """Return the first bytes of a buffer as words; zeros fill the last unit: the size tells them from the file's."""
    end = -(-count // unit) * unit
    buffer[count:end] = 0
    return buffer[:end].view("<u8")
