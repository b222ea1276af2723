"""Pinned host memory, which a GPU copies from and to at full speed: one range, allocated once.

    slab = HostSlab(60 << 30, torch.device("cuda"))
    slab.memory                                         # bytes, as a tensor

Huge pages are requested and touched by several threads, since page faults are what takes long. They are pinned by one
call: a copy must not cross from one registered range into another. Several runs of one process can share a slab. It is
freed with its last reference; no copy may be in progress then.
"""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from weakref import finalize

import torch
from torch import Tensor

from llmb.errors import LaunchError
from llmb.perfmodel.hardware import GIB

TOUCHED_AT_ONCE = 1 << 28  # bytes


class HostSlab:
    """Pinned if the device is a GPU, pageable memory otherwise; page-aligned, as O_DIRECT needs it."""

    def __init__(self, size: int, device: torch.device):
        self.size = size
        self.memory = torch.empty(0, dtype=torch.uint8) if size == 0 else _large_pages(size)
        if device.type != "cuda" or size == 0:
            return
        _touch(self.memory)
        code = int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), size, 0))
        if code:
            raise LaunchError(f"the driver does not pin {size / GIB:.1f} GiB of host memory (CUDA error {code})")
        finalize(self, _unlock, self.memory).atexit = False  # at exit the process frees everything at once


def _large_pages(size: int) -> Tensor:
    try:
        pages = mmap.mmap(-1, size)
    except OSError as error:
        raise LaunchError(f"the host does not give {size / GIB:.1f} GiB of memory: {error.strerror}") from error
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _touch(memory: Tensor) -> None:
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        for _ in threads.map(Tensor.zero_, memory.split(TOUCHED_AT_ONCE)):
            pass
