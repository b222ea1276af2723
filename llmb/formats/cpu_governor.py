"""Frequency governors of the CPUs, from the kernel."""

from pathlib import Path

CPUS = "sys/devices/system/cpu"


def cpu_governors(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the governors in use, sorted; empty where the kernel sets no frequencies, as in a virtual machine."""
    governors = set()
    for path in (root / CPUS).glob("cpu[0-9]*/cpufreq/scaling_governor"):
        try:
            governors.add(path.read_text().strip())
        except OSError:
            continue
    return tuple(sorted(governors))
