"""Buckets that live on disk: read ahead into staging buffers of the host, and written behind from others.

    tier = DiskTier(folder, keys, sizes, device)
    tier.read_ahead(key)                                # in the order in which buckets are copied in
    buffer = tier.next_read(key)                        # waits for it; then the copy to the device is issued
    tier.release(key, buffer, copied)                   # `copied`: event behind that copy
    buffer = tier.write_buffer(key)                     # waits for one; then the copy to the host is issued
    tier.write_behind(key, buffer, copied)

One thread reads and one writes, each in order; whatever one of them waits for was issued before. A GPU cannot wait for
a file, so Python does, where a copy needs a buffer: by then the GPU has all work that comes before. A failed transfer
is raised at the next wait.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from llmb.offload.cuda_streams import HostEvent, StreamEvent
from llmb.offload.disk.disk_file import DiskFile
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel.offload.buffers import STAGING_BUFFERS, BufferKey, bytes_on_disk

Transferred = Callable[[HostEvent, HostEvent], None]  # called when a transfer is done, with its start and end


class DiskTier:
    """Files and staging buffers of the buckets that live on disk."""

    def __init__(self, folder: Path, keys: Iterable[BufferKey], sizes: dict[str, int], device: torch.device):
        """`sizes`: bytes of a buffer, by kind."""
        self._offsets: dict[BufferKey, int] = {}
        self._sizes = sizes
        total = 0
        for key in sorted(keys):
            self._offsets[key] = total
            total += bytes_on_disk(sizes[key.kind])
        self.file = DiskFile(folder, total)
        kinds = sorted({key.kind for key in self._offsets})
        self.staging_bytes = sum(2 * STAGING_BUFFERS * bytes_on_disk(sizes[kind]) for kind in kinds)
        memory = iter(HostSlab(self.staging_bytes, device).memory.split(
            [bytes_on_disk(sizes[kind]) for kind in kinds for _ in range(2 * STAGING_BUFFERS)]
        ))  # fmt: skip
        # Free buffers in the order of their last use, with what that waits for.
        self._for_reads: dict[str, deque[tuple[Tensor, StreamEvent | None]]] = {}
        self._for_writes: dict[str, deque[tuple[Tensor, Future[None] | None]]] = {}
        for kind in kinds:
            self._for_reads[kind] = deque((next(memory), None) for _ in range(STAGING_BUFFERS))
            self._for_writes[kind] = deque((next(memory), None) for _ in range(STAGING_BUFFERS))
        self._reads: deque[tuple[BufferKey, Tensor, Future[None]]] = deque()  # issued, and not yet copied
        self._writes: dict[BufferKey, Future[None]] = {}  # the last of each bucket
        self._reader, self._writer = (ThreadPoolExecutor(1) for _ in range(2))

    def __contains__(self, key: BufferKey) -> bool:
        return key in self._offsets

    def can_read_ahead(self, key: BufferKey) -> bool:
        """Return whether the copy that last used the next buffer of this kind was issued."""
        return bool(self._for_reads[key.kind])

    def read_ahead(self, key: BufferKey, transferred: Transferred | None = None) -> None:
        """Begin to read a bucket, once the next buffer is free and the bucket's own write is done."""
        buffer, copied = self._for_reads[key.kind].popleft()
        written = self._writes.get(key)

        def read() -> None:
            if copied is not None:
                copied.wait()
            if written is not None:
                written.result()
            self._transfer(self.file.read, key, buffer, transferred)

        self._reads.append((key, buffer, self._reader.submit(read)))

    def next_read(self, key: BufferKey) -> Tensor:
        """Return the buffer with the bucket that was read first of those not yet copied; waits for it."""
        read, buffer, done = self._reads.popleft()
        assert read == key, f"{read} was read ahead, {key} is copied in"
        done.result()
        return buffer

    def release(self, key: BufferKey, buffer: Tensor, copied: StreamEvent) -> None:
        """Return a buffer after its copy to the device was issued."""
        self._for_reads[key.kind].append((buffer, copied))

    def write_buffer(self, key: BufferKey) -> Tensor:
        """Return the next buffer of this kind for a copy from the device; waits until it is written."""
        buffer, written = self._for_writes[key.kind].popleft()
        if written is not None:
            written.result()
        return buffer

    def write_behind(
        self, key: BufferKey, buffer: Tensor, copied: StreamEvent, transferred: Transferred | None = None
    ) -> None:
        """Write a bucket once its copy from the device, which was issued, is done."""

        def write() -> None:
            copied.wait()
            self._transfer(self.file.write, key, buffer, transferred)

        written = self._writes[key] = self._writer.submit(write)
        self._for_writes[key.kind].append((buffer, written))

    def wait(self) -> None:
        """Wait for all writes; those behind a read are part of it."""
        for written in self._writes.values():
            written.result()

    def load(self, key: BufferKey) -> Tensor:
        """Return a bucket in memory of its own; nothing may be in progress."""
        memory = HostSlab(bytes_on_disk(self._sizes[key.kind]), torch.device("cpu")).memory
        self.file.read(memory, self._offsets[key])
        return memory

    def store(self, key: BufferKey, memory: Tensor) -> None:
        """Write a bucket that `load` returned."""
        self.file.write(memory, self._offsets[key])

    def _transfer(
        self, call: Callable[[Tensor, int], None], key: BufferKey, buffer: Tensor, transferred: Transferred | None
    ) -> None:
        start = HostEvent()
        call(buffer, self._offsets[key])
        if transferred is not None:
            transferred(start, HostEvent())
