"""A living process, as /proc describes it: its parent, its group, when it began and what it has done."""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One living process; a zombie counts as dead."""

    pid: int
    parent: int
    group: int
    started: int  # clock ticks since boot: tells a process from a later one with the same pid
    worked_s: float  # CPU time so far, of all its threads


def find(pid: int) -> Process | None:
    """The living process of this pid, if there is one."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, parent, group, *rest = line[line.rindex(b")") + 2 :].split()  # the name in brackets may hold anything
    worked_s = (int(rest[8]) + int(rest[9])) / TICKS_PER_S
    return None if state in (b"Z", b"X") else Process(pid, int(parent), int(group), int(rest[16]), worked_s)


def descendants(pid: int) -> list[Process]:
    """Every living process that stems from this one."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        process = find(int(entry)) if entry.isdigit() else None
        if process is not None:
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    unseen = [pid]
    while unseen:
        young = children.get(unseen.pop(), [])
        found += young
        unseen += [process.pid for process in young]
    return found
