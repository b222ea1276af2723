"""Live processes from /proc, with parent, process group, start time and CPU time; counters of the kernel."""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class LiveProcess:
    """One live process; a zombie counts as dead."""

    pid: int
    parent: int
    group: int
    started: int  # clock ticks since boot: tells a process from a later one with the same pid
    cpu_time_s: float  # so far, of all its threads


def find_process(pid: int) -> LiveProcess | None:
    """Return the live process with this pid, if there is one."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, parent, group, *fields = line[line.rindex(b")") + 2 :].split()  # the name in brackets may hold anything
    cpu_time_s = (int(fields[8]) + int(fields[9])) / TICKS_PER_S
    return None if state in (b"Z", b"X") else LiveProcess(pid, int(parent), int(group), int(fields[16]), cpu_time_s)


def descendants(pid: int) -> list[LiveProcess]:
    """Return every live descendant of a process."""
    children: dict[int, list[LiveProcess]] = {}
    for entry in os.listdir("/proc"):
        process = find_process(int(entry)) if entry.isdigit() else None
        if process is not None:
            children.setdefault(process.parent, []).append(process)
    processes: list[LiveProcess] = []
    pending = [pid]
    while pending:
        spawned = children.get(pending.pop(), [])
        processes += spawned
        pending += [process.pid for process in spawned]
    return processes


def meminfo_bytes(name: str) -> int | None:
    """Return an entry of /proc/meminfo, which is in KiB; None if the kernel has no such entry."""
    kib = read_counter(Path("/proc/meminfo"), f"{name}:")
    return None if kib is None else kib << 10


def read_counter(path: Path, name: str) -> int | None:
    """Return the number after a name in a file with one name and number a line; None if it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    numbers = (line.split()[1] for line in lines if line.startswith(f"{name} ") and len(line.split()) > 1)
    return next((int(number) for number in numbers if number.isdigit()), None)
