"""File format of an archive: one Zstandard frame and a checksum, which detects every change to the file.

    frame of the tar file | magic of a skippable frame, length 32 | SHA-256 of everything before

`zstd` and `tar` ignore a skippable frame, so they can open the file. A frame's own checksum is not enough: it covers
neither the frame's header nor data appended to the frame. The checksum detects damage, it does not authenticate: the
content is still untrusted.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from llmb.errors import ConfigError, LaunchError

LEVEL = 9
CHUNK_BYTES = 2**20
MAGIC = struct.pack("<II", 0x184D2A50, 32)
CHECKSUM_BYTES = len(MAGIC) + 32
MAX_WINDOW_BYTES = 2**27  # of memory that a frame may request
MAX_EXPANSION = 1000  # a repetitive log compresses well, but beyond this it is a decompression bomb
ALWAYS_ALLOWED_BYTES = 256 * 2**20


def zstandard() -> ModuleType:
    """Import the zstandard package, or raise a LaunchError that says how to install it."""
    try:
        import zstandard
    except ImportError as error:
        raise LaunchError("archives need the zstandard package: pip install zstandard") from error
    return zstandard


@contextmanager
def compressed_writer(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a stream that compresses to one frame. One thread and fixed settings: the same bytes every time."""
    compressor = zstandard().ZstdCompressor(level=LEVEL, threads=0, write_checksum=True)
    with compressor.stream_writer(file, closefd=False) as stream:
        yield stream


def append_checksum(file: BinaryIO) -> None:
    """Append the checksum to a file that is open for reading and writing."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    file.write(MAGIC + digest.digest())


def verify_checksum(file: BinaryIO, progress: Callable[[int], None]) -> str:
    """Return the checksum of a file, or raise a ConfigError where it does not match."""
    left = file.seek(0, 2) - CHECKSUM_BYTES
    if left <= 0:
        raise ConfigError("it is too short")
    file.seek(0)
    digest = hashlib.sha256()
    while left and (chunk := file.read(min(CHUNK_BYTES, left))):
        digest.update(chunk)
        left -= len(chunk)
        progress(len(chunk))
    if file.read(CHECKSUM_BYTES) != MAGIC + digest.digest():
        raise ConfigError("it is truncated or modified, or is not an archive of llmb-run")
    return digest.hexdigest()


class BoundedDecompressor:
    """Decompressed content as a stream that refuses a decompression bomb."""

    def __init__(self, file: BinaryIO):
        compressed_bytes = file.seek(0, 2) - CHECKSUM_BYTES
        file.seek(0)
        self._left = max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * compressed_bytes)
        decompressor = zstandard().ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._stream: Any = decompressor.stream_reader(file, read_size=CHUNK_BYTES, closefd=False)

    def read(self, size: int) -> bytes:
        chunk: bytes = self._stream.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise ConfigError("it expands to far more than an archive holds")
        return chunk


def default_archive_name(version: str, stamp: str) -> Path:
    """Return the default file name of an archive."""
    return Path(f"llmb-archive_{version}_{stamp}.tar.zst")
