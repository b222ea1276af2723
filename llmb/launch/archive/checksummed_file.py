"""The file an archive lies in: one Zstandard frame and a seal, by which every change to the file is noticed.

    frame of the tar file | magic of a skippable frame, length 32 | SHA-256 of all that is before

`zstd` and `tar` pass over a skippable frame, so the file opens with them. A frame's own checksum is not enough: it does
not cover the frame's header, nor what is put behind the frame. A seal shows damage, not who made the file: what comes
out of a sealed file is still somebody else's.
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
AT_ONCE = 2**20  # bytes
MAGIC = struct.pack("<II", 0x184D2A50, 32)
SEAL_BYTES = len(MAGIC) + 32
LARGEST_WINDOW = 2**27  # bytes of memory that a frame may ask for
LARGEST_GROWTH = (
    1000  # times; a log that repeats itself shrinks far, but what grows more than this is made to fill disks
)
ALWAYS_ALLOWED = 256 * 2**20  # bytes


def zstandard() -> ModuleType:
    """The package, or the line that says how to get it."""
    try:
        import zstandard
    except ImportError as error:
        raise LaunchError("archives need the zstandard package: pip install zstandard") from error
    return zstandard


@contextmanager
def packing(file: BinaryIO) -> Iterator[BinaryIO]:
    """Write to what this gives; the frame ends with it. One thread and fixed settings: the same bytes every time."""
    packer = zstandard().ZstdCompressor(level=LEVEL, threads=0, write_checksum=True)
    with packer.stream_writer(file, closefd=False) as stream:
        yield stream


def seal(file: BinaryIO) -> None:
    """End a packed file, which is open to be read and written."""
    file.seek(0)
    made = hashlib.sha256()
    while piece := file.read(AT_ONCE):
        made.update(piece)
    file.write(MAGIC + made.digest())


def check_seal(file: BinaryIO, progress: Callable[[int], None]) -> str:
    """Refuse a file that is not as it was sealed; gives the seal."""
    left = file.seek(0, 2) - SEAL_BYTES
    if left <= 0:
        raise ConfigError("it is too short")
    file.seek(0)
    made = hashlib.sha256()
    while left and (piece := file.read(min(AT_ONCE, left))):
        made.update(piece)
        left -= len(piece)
        progress(len(piece))
    if file.read(SEAL_BYTES) != MAGIC + made.digest():
        raise ConfigError("it was cut off or changed, or is no archive of llmb-run")
    return made.hexdigest()


class Unpacked:
    """What is in a sealed file, as a stream that ends where it grows too large to be honest."""

    def __init__(self, file: BinaryIO):
        packed = file.seek(0, 2) - SEAL_BYTES
        file.seek(0)
        self._left = max(ALWAYS_ALLOWED, LARGEST_GROWTH * packed)
        unpacker = zstandard().ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        self._stream: Any = unpacker.stream_reader(file, read_size=AT_ONCE, closefd=False)

    def read(self, size: int) -> bytes:
        piece: bytes = self._stream.read(size)
        self._left -= len(piece)
        if self._left < 0:
            raise ConfigError("it unpacks to far more than such files hold")
        return piece


def sealed_name(version: str, stamp: str) -> Path:
    """What an archive is called unless the user says otherwise."""
    return Path(f"llmb-archive_{version}_{stamp}.tar.zst")
