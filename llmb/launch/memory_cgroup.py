"""Memory cgroups of this process: what they leave free, and how many processes the OOM killer has ended.

    peak_usage()         the most memory that a limited cgroup ever used, in words
    memory_limits()      limits of this process's cgroup and those above it; empty where there are none
    oom_kills()          {source: count}; a count that rises during a run means that the kernel killed for memory

Both versions of cgroups are read. A cgroup that cannot be read counts as unlimited.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmb.launch.procfs import read_counter

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")
UNLIMITED = 1 << 60  # version 1 states the largest multiple of a page


@dataclass(frozen=True)
class MemoryLimit:
    """Limit of one cgroup, in bytes."""

    limit: int
    used: int  # without page cache, which the kernel can drop

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


def memory_limits() -> list[MemoryLimit]:
    """Return the limits of this process's memory cgroup and of those above it."""
    limits = []
    for folder, is_v2 in _memory_folders():
        limit = _read_number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        usage = _read_number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if limit is not None and usage is not None and limit < UNLIMITED:
            cache = read_counter(folder / "memory.stat", "inactive_file" if is_v2 else "total_inactive_file") or 0
            limits.append(MemoryLimit(limit, usage - cache))
    return limits


def oom_kills() -> dict[str, int]:
    """Return the number of processes that the OOM killer has ended, by what counts it: the machine and each cgroup."""
    counts = {"this machine": read_counter(VMSTAT, "oom_kill")}
    for folder, is_v2 in _memory_folders():
        name = f"cgroup {folder.name}"
        counts[name] = read_counter(folder / ("memory.events" if is_v2 else "memory.oom_control"), "oom_kill")
    return {source: count for source, count in counts.items() if count is not None}


def peak_usage() -> str | None:
    """Return the peak and the limit of the smallest limited cgroup in words; None: there is none, or an old kernel."""
    peaks = []
    for folder, is_v2 in _memory_folders():
        limit = _read_number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        peak = _read_number(folder / ("memory.peak" if is_v2 else "memory.max_usage_in_bytes"))
        if limit is not None and peak is not None and limit < UNLIMITED:
            peaks.append((limit, peak, folder.name))
    if not peaks:
        return None
    limit, peak, name = min(peaks)
    return f"cgroup {name}: peak {peak / 2**30:.2f} GiB, limit {limit / 2**30:.2f} GiB"


def _memory_folders() -> Iterator[tuple[Path, bool]]:
    """Yield the folder of this process's memory cgroup and those above it, and whether they are of version 2."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUP_ROOT / "memory" if controllers else CGROUP_ROOT
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            if folder.is_dir():
                yield folder, not controllers
            folder = folder.parent


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
