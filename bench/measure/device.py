"""The device of a benchmark: its name, synchronization, and release of memory between measurements."""

import gc
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch

from llmb.errors import LaunchError
from llmb.perfmodel import hardware
from measure.bench_report import BenchReport


def describe_machine(device: torch.device) -> str:
    """Return GPU, torch and Python versions in one line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def gpu_name(device: torch.device) -> str:
    """Return the key of this device in hardware.GPUS."""
    if device.type == "cpu":
        return "cpu"
    gpu = hardware.identify_gpu(torch.cuda.get_device_name(device))
    if gpu is None:
        raise LaunchError(f"{describe_machine(device)}: the peak of this GPU is unknown; see llmb/perfmodel/gpu_types")
    return gpu


@dataclass(kw_only=True)
class DeviceReport(BenchReport):
    """Results of a program that measures one device."""

    device: torch.device

    @property
    def machine(self) -> str:
        return describe_machine(self.device)

    @property
    def gpu(self) -> str:
        """A key of hardware.GPUS."""
        return gpu_name(self.device)

    def peak(self, dtype: str) -> float | None:
        """FLOP/s."""
        return hardware.peak_flops(self.gpu, dtype)


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Release unused memory, and lift torch's memory limit."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # a failed device raises again when it is next used
            torch.cuda.synchronize(device)
            torch._C._cuda_clearCublasWorkspaces()  # a few MiB, but perhaps of a segment that holds GiB
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0, device)
