"""GPU names and memory sizes of this machine, from nvidia-smi and the kernel, without importing torch."""

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from llmb.launch.memory_cgroup import memory_limits
from llmb.launch.procfs import meminfo_bytes


def gpu_names() -> list[str]:
    """Return the driver's name of every GPU; empty on a machine without one."""
    return _nvidia_smi("name")


def gpu_memory_bytes() -> int | None:
    """Return the total memory of the first GPU; None where there is none, or its driver does not report it."""
    values = _nvidia_smi("memory.total", ",nounits")  # in MiB
    return int(values[0]) << 20 if values and values[0].isdigit() else None


def unsupported_gpu(kfd: Path = Path("/dev/kfd")) -> str | None:
    """Return one line about a GPU here that the engines do not use, AMD's or Apple's; None: there is none."""
    if gpu_names():
        return None
    if kfd.exists():  # AMD's driver
        return "this machine has an AMD GPU, which the engines do not use: they need CUDA, so runs here are on the CPU"
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "Apple's GPU is not used: the engines need CUDA, so runs here are on the CPU"
    return None


def _nvidia_smi(field: str, format_suffix: str = "") -> list[str]:
    """Return one value per GPU; none where nvidia-smi fails."""
    program = shutil.which("nvidia-smi")
    if program is None:  # a CPU machine; WSL has nvidia-smi and no device files
        return []
    return list(_query(program, f"--query-gpu={field}", f"--format=csv,noheader{format_suffix}"))


@cache
def _query(*command: str) -> tuple[str, ...]:
    """Return the lines of a query, which takes up to seconds: each run that a command checks asks the same."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in process.stdout.splitlines() if line.strip())


def host_memory_bytes() -> int:
    """Return the total host memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory_bytes() -> int:
    """Return the host memory that new processes can take: what the kernel says, at most what cgroups leave."""
    available = meminfo_bytes("MemAvailable")
    return min([host_memory_bytes() if available is None else available, *(limit.free for limit in memory_limits())])
