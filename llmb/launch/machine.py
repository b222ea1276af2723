"""What this machine has, without importing torch: GPUs by name, and memory."""

import os
import subprocess
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_names() -> list[str]:
    """The driver's name of every GPU here; empty on a machine without one."""
    if not Path("/dev/nvidiactl").exists() and not DRIVER.is_dir():
        return []  # a CPU machine answers at once
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def host_memory_bytes() -> int:
    """All of it, in use or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
