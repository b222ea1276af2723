"""Peak memory of this process, and recognition of out-of-memory errors from torch, the driver and libraries."""

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from llmb.runtime.run_ending import OutOfMemory

OOM_MESSAGES = (
    "can't allocate memory",  # torch's CPU allocator
    "CUDA error: out of memory",  # the driver
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS, whose workspace is allocated last
)

_REQUESTED = re.compile(r"Tried to allocate ([\d.]+) ([KMG])iB")  # torch's GPU allocator
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: tensors on a GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; outside torch's GPU allocator only the message tells."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in OOM_MESSAGES)


@contextmanager
def explain_oom(message: Callable[[Exception], str]) -> Iterator[None]:
    """Turn any out-of-memory error raised inside into OutOfMemory with a message, which says what to change."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(message(error)) from error
        raise


def requested_bytes(error: Exception) -> float:
    """Return the size of the failed allocation; 0 where the error does not say."""
    match = _REQUESTED.search(str(error))
    return float(match[1]) * _UNITS[match[2]] if match else 0.0
