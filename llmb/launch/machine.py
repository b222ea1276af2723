"""Which GPUs this machine has, by name, without importing torch."""

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
