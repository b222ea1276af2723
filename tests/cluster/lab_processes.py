"""Processes of a Slurm lab, found by its pid files and by SLURM_CONF in their environment."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd-*", "slurmdbd", "mariadb", "munged")  # in the order in which they stop fastest


def stop_lab(folder: Path) -> None:
    """End every process of the lab in this folder."""
    for daemon in DAEMONS:
        pids = daemons(folder, daemon)
        for pid in pids:
            kill(pid, signal.SIGTERM)
        wait_gone(pids, 5.0)
        for pid in pids:
            kill(pid, signal.SIGKILL)
        for file in (folder / "run").glob(f"{daemon}.pid"):
            file.unlink(missing_ok=True)
    kill_tasks(folder)
    if (folder / "etc/cgroup.conf").exists():
        _remove_cgroups()


def kill_tasks(folder: Path, node: str | None = None) -> None:
    """Kill the steps of a node, before they can report anything, with their tasks; without a node, everything.

    Repeated until none is left, as a task may have started meanwhile.
    """
    mark = f"SLURMD_NODENAME={node}".encode()
    while tasks := [pid for pid, environ in lab_processes_of(folder) if node is None or mark in environ]:
        steps = {parent for parent in map(parent_pid, tasks) if runs_program(parent, "slurmstepd")}
        for pid in (*steps, *tasks):
            kill(pid, signal.SIGKILL)
        wait_gone([*steps, *tasks], 5.0)


def daemons(folder: Path, daemon: str) -> list[int]:
    """Return the live processes of these pid files; a reused pid does not count."""
    pids = []
    for file in (folder / "run").glob(f"{daemon}.pid"):
        with suppress(ValueError, OSError):
            pid = int(file.read_text())
            if is_alive(pid) and runs_program(pid, daemon.split("-")[0]):
                pids.append(pid)
    return pids


def lab_processes_of(folder: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yield processes with this lab's SLURM_CONF, except this one and its parent."""
    mark = f"SLURM_CONF={folder}/etc/slurm.conf".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
            continue
        with suppress(OSError):
            environ = (entry / "environ").read_bytes().split(b"\0")
            if mark in environ:
                yield int(entry.name), environ


def parent_pid(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("PPid:"):
                return int(line.split()[1])
    return 0


def runs_program(pid: int, program: str) -> bool:
    """Return whether the process runs this program, by name: slurmstepd overwrites its environment with its title."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(program)
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int, sig: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, sig)


def wait_gone(pids: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)


def _remove_cgroups() -> None:
    for top in Path("/sys/fs/cgroup").glob("*/slurm_n*"):
        for path, _, _ in os.walk(top, topdown=False):
            with suppress(OSError):
                os.rmdir(path)
