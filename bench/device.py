"""The device a benchmark runs on: what it is, and how it is handed from one measurement to the next."""

import gc
import sys
from contextlib import suppress

import torch

from llmb.errors import LaunchError
from llmb.perfmodel import hardware


def machine_of(device: torch.device) -> str:
    """One line for a reader."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def gpu_of(device: torch.device) -> str:
    """A key of hardware.GPUS."""
    if device.type == "cpu":
        return "cpu"
    found = hardware.identify_gpu(torch.cuda.get_device_name(device))
    if found is None:
        raise LaunchError(f"{machine_of(device)}: a GPU of which no peak is known; see llmb/perfmodel/hardware.py")
    return found


def finish(device: torch.device) -> None:
    """Wait until it has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def let_go(device: torch.device) -> None:
    """Give memory back that nothing needs any more, and torch the whole device."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # a device that has failed says so again when it is next used
            torch.cuda.synchronize(device)
            torch._C._cuda_clearCublasWorkspaces()  # a few MiB, but perhaps of a segment that holds GiB
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0, device)
