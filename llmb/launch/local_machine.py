"""GPU names and memory sizes of this machine, without importing torch."""

import os
import subprocess
from pathlib import Path

DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


def gpu_names() -> list[str]:
    """Return the driver's name of every GPU; empty on a machine without one."""
    if not Path("/dev/nvidiactl").exists() and not DRIVER_FOLDER.is_dir():
        return []  # returns at once on a CPU machine
    return _nvidia_smi("name")


def gpu_memory_bytes() -> int | None:
    """Return the total memory of the first GPU; None where there is none, or its driver does not report it."""
    if not Path("/dev/nvidiactl").exists() and not DRIVER_FOLDER.is_dir():
        return None
    values = _nvidia_smi("memory.total", ",nounits")  # in MiB
    return int(values[0]) << 20 if values and values[0].isdigit() else None


def _nvidia_smi(field: str, format_suffix: str = "") -> list[str]:
    """Return one value per GPU; none where nvidia-smi fails."""
    query = ["nvidia-smi", f"--query-gpu={field}", f"--format=csv,noheader{format_suffix}"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in process.stdout.splitlines() if line.strip()]


def host_memory_bytes() -> int:
    """Return the total host memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
