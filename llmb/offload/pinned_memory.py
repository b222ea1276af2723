"""Host memory that a GPU copies from and to at full speed: one stretch, locked in place, taken once.

    slab = HostSlab(60 << 30, torch.device("cuda"))
    slab.memory                                         # bytes, as a tensor

Pages are asked for in large ones and touched by several threads, since locking them is what takes long. They are locked
by one call: a copy may not reach from what one call has locked into what another has. Several runs of one process can
share a slab. It is given back when nobody has it any more; nothing may be under way to or from it then.
"""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from weakref import finalize

import torch
from torch import Tensor

from llmb.errors import LaunchError
from llmb.perfmodel.hardware import GIB

TOUCHED_AT_ONCE = 1 << 28  # bytes


class HostSlab:
    """Locked where the device is a GPU, plain memory otherwise."""

    def __init__(self, size: int, device: torch.device):
        self.size = size
        if device.type != "cuda" or size == 0:
            self.memory = torch.empty(size, dtype=torch.uint8)
            return
        self.memory = _touched(_large_pages(size))
        code = int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), size, 0))
        if code:
            raise LaunchError(f"the driver does not lock {size / GIB:.1f} GiB of host memory (CUDA error {code})")
        finalize(self, _unlock, self.memory).atexit = False  # a process that ends gives back all at once


def _large_pages(size: int) -> Tensor:
    try:
        pages = mmap.mmap(-1, size)
    except OSError as error:
        raise LaunchError(f"the host does not give {size / GIB:.1f} GiB of memory: {error.strerror}") from error
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _touched(memory: Tensor) -> Tensor:
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        for _ in threads.map(Tensor.zero_, memory.split(TOUCHED_AT_ONCE)):
            pass
    return memory
