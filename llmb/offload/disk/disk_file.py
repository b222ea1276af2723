"""File of a disk tier: space reserved at once, read and written in blocks by a few threads, past the page cache.

    file = DiskFile(Path("/nvme/scratch"), 64 << 30)
    file.write(memory, offset=0)                        # memory: a page-aligned tensor of bytes on the host
    file.read(memory, offset=0)
    file.is_direct                                      # O_DIRECT; else buffered, and dropped from the page cache

The name is removed as soon as the file is open: its space is free again when the process ends, however it ends. Blocks
release the interpreter lock, so training goes on meanwhile. A disk that is full or fails raises a LaunchError.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from weakref import finalize

from torch import Tensor

from llmb.errors import LaunchError
from llmb.perfmodel.hardware import GIB

BLOCK_BYTES = 4 << 20
QUEUE_DEPTH = 4  # blocks in flight, per direction
PREFIX = "llmb-offload-"


class DiskFile:
    """One file in a folder that the user named."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size
        self.bytes_read = self.bytes_written = 0
        with self._named("reserve", size):
            self._descriptor, self.is_direct = _create(folder, size)
        finalize(self, os.close, self._descriptor)
        self._readers, self._writers = (ThreadPoolExecutor(QUEUE_DEPTH) for _ in range(2))

    @property
    def mode(self) -> str:
        return "O_DIRECT" if self.is_direct else "buffered"

    def read(self, memory: Tensor, offset: int) -> None:
        """Fill memory from the file."""
        with self._named("read", memory.numel()):
            for _ in self._readers.map(self._read_block, *_blocks(memory, offset)):
                pass
        self._drop_cache(memory.numel(), offset)
        self.bytes_read += memory.numel()

    def write(self, memory: Tensor, offset: int) -> None:
        """Write memory to the file."""
        with self._named("write", memory.numel()):
            for _ in self._writers.map(self._write_block, *_blocks(memory, offset)):
                pass
            if not self.is_direct:  # only pages that are clean leave the cache
                os.fdatasync(self._descriptor)
        self._drop_cache(memory.numel(), offset)
        self.bytes_written += memory.numel()

    def _read_block(self, block: memoryview, offset: int) -> None:
        self._transfer(os.preadv, block, offset)

    def _write_block(self, block: memoryview, offset: int) -> None:
        self._transfer(os.pwritev, block, offset)

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], block: memoryview, offset: int) -> None:
        done = 0
        while done < len(block):
            count = call(self._descriptor, [block[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"it ends at {offset + done} of {self.size} bytes")
            done += count

    def _drop_cache(self, size: int, offset: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def _named(self, verb: str, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LaunchError(
                f"cannot {verb} {size / GIB:.3g} GiB of the file of the disk tier in {self.folder}: {error.strerror}"
            ) from error


def _create(folder: Path, size: int) -> tuple[int, bool]:
    """Return the descriptor of a new file without a name, and whether it bypasses the page cache."""
    private = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    path = private / "buckets"
    try:
        descriptor, is_direct = _open(path)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.close(descriptor)
            raise
    finally:
        path.unlink(missing_ok=True)
        private.rmdir()
    return descriptor, is_direct


def _open(path: Path) -> tuple[int, bool]:
    """Open a new file with O_DIRECT if its file system takes it, which only a transfer shows for certain."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = -1
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwritev(descriptor, [page], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if descriptor >= 0:
            os.close(descriptor)
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o600), False
    return descriptor, True


def _blocks(memory: Tensor, offset: int) -> tuple[list[memoryview], list[int]]:
    """Cut memory into blocks, with their offsets in the file."""
    view, firsts = memory.numpy().data, range(0, memory.numel(), BLOCK_BYTES)
    return [view[first : first + BLOCK_BYTES] for first in firsts], [offset + first for first in firsts]


def buffered_line(folder: Path) -> str | None:
    """Return that a folder's file system does not take O_DIRECT, in one line; None: it does, or is not writable."""
    try:
        descriptor, is_direct = _create(folder, mmap.PAGESIZE)
    except OSError:
        return None
    os.close(descriptor)
    return None if is_direct else f"{folder} does not take O_DIRECT: the disk tier goes through the page cache"
