"""How much memory a run took, how to recognise that there was not enough, and what to change then."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmb.hardware import GIB
from llmb.spec import Model, Training
from llmb.train.endings import OutOfMemory

SHORTAGE_WORDS = (
    "can't allocate memory",  # torch's CPU allocator
    "CUDA error: out of memory",  # the driver
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS, whose workspace comes last
)


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


def shortage(device: torch.device, model: Model, work: Training) -> str:
    """One line: the peak, and the next thing to try."""
    if work.recompute_layers < model.layers:
        advice = f"raise recompute_layers (now {work.recompute_layers} of {model.layers})"
    elif work.mbs > 1:
        advice = f"lower mbs (now {work.mbs})"
    else:
        advice = f"lower seqlen (now {work.seqlen}) or take a smaller model"
    total = ""
    if device.type == "cuda":
        total = f" of {torch.cuda.get_device_properties(device).total_memory / GIB:.1f} GiB"
    return f"out of memory at a peak of {peak_bytes(device) / GIB:.1f} GiB{total}: {advice}"


@contextmanager
def naming_shortage(device: torch.device, model: Model, work: Training) -> Iterator[None]:
    """Whatever form a lack of memory takes inside, it leaves as OutOfMemory with advice."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(shortage(device, model, work)) from error
        raise
