"""The GPUs of a server under load, where they can be known: those of the process that listens at its address here.

    name, facts = server_device("http://localhost:8000")      # None, None of a server elsewhere

A loopback address alone proves nothing: it may be a tunnel. So the listening process is looked up in /proc, and a GPU
counts if nvidia-smi lists that process or a descendant of it. Of several GPUs, a fact in which they differ is null.
"""

import re
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmb.formats.device_facts import gpu_facts
from llmb.formats.nvidia_smi import GpuStatus, query_gpus
from llmb.loadgen.client.http_client import Target

PROC = Path("/proc")
LISTENING = "0A"  # state of a socket in /proc/net/tcp
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def server_device(url: str) -> tuple[str | None, dict[str, Any] | None]:
    """Return name and facts of the GPUs that a server on this machine uses; None: they cannot be known."""
    target = Target.from_url(url)
    if target.host not in (*LOOPBACK, socket.gethostname()):
        return None, None
    listeners = set(_listeners(target.port))
    if not listeners:
        return None, None
    gpus = [gpu for gpu in query_gpus(links=False)[0] if any(_serves(p.pid, listeners) for p in gpu.processes)]
    return _common(gpus)


def _common(gpus: list[GpuStatus]) -> tuple[str | None, dict[str, Any] | None]:
    if not gpus:
        return None, None
    names, facts = {gpu.name for gpu in gpus}, [asdict(gpu_facts(gpu)) for gpu in gpus]
    common = {name: value for name, value in facts[0].items() if all(other[name] == value for other in facts)}
    return names.pop() if len(names) == 1 else None, common


def _listeners(port: int) -> Iterator[int]:
    """Yield the processes that listen at a port and may be looked at."""
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(table, port)}
    for folder in PROC.glob("[0-9]*/fd") if sockets else ():
        try:
            if any(str(link.readlink()) in sockets for link in folder.iterdir()):
                yield int(folder.parent.name)
        except OSError:  # another user's, or gone
            continue


def _inodes(table: str, port: int) -> Iterator[str]:
    try:
        lines = (PROC / "net" / table).read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        columns = line.split()
        local, state, inode = columns[1], columns[3], columns[9]
        if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
            yield inode


def _serves(pid: int, listeners: set[int]) -> bool:
    """Return whether a process is a listener or a descendant of one."""
    while pid > 1:
        if pid in listeners:
            return True
        try:
            parent = re.search(r"^PPid:\s+(\d+)", (PROC / str(pid) / "status").read_text(), re.M)
        except OSError:
            return False
        pid = int(parent[1]) if parent else 0
    return False
