"""What this machine has, without importing torch: GPUs by name, and memory."""

import os
import subprocess
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_names() -> list[str]:
    """The driver's name of every GPU here; empty on a machine without one."""
    if not Path("/dev/nvidiactl").exists() and not DRIVER.is_dir():
        return []  # a CPU machine answers at once
    return _asked_driver("name")


def gpu_memory_bytes() -> int | None:
    """All of the first GPU's, in use or not; null where there is none, or its driver does not say."""
    if not Path("/dev/nvidiactl").exists() and not DRIVER.is_dir():
        return None
    listed = _asked_driver("memory.total", ",nounits")  # in MiB
    return int(listed[0]) << 20 if listed and listed[0].isdigit() else None


def _asked_driver(field: str, form: str = "") -> list[str]:
    """A line for each GPU; none where the driver cannot be asked."""
    query = ["nvidia-smi", f"--query-gpu={field}", f"--format=csv,noheader{form}"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def host_memory_bytes() -> int:
    """All of it, in use or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
