"""How much memory this process took, and how to recognise that there was not enough, whoever says so."""

import re
import resource

import torch

SHORTAGE_WORDS = (
    "can't allocate memory",  # torch's CPU allocator
    "CUDA error: out of memory",  # the driver
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS, whose workspace comes last
)

_ASKED_FOR = re.compile(r"Tried to allocate ([\d.]+) ([KMG])iB")  # torch's GPU allocator
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def peak_bytes(device: torch.device) -> int:
    """The most this process held at once so far: tensors on a GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out; below torch's own GPU allocator only the text tells."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SHORTAGE_WORDS)


def bytes_asked(error: Exception) -> float:
    """The allocation that failed; 0 where the error does not say."""
    found = _ASKED_FOR.search(str(error))
    return float(found[1]) * _UNITS[found[2]] if found else 0.0
