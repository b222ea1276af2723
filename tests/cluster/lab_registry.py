"""Registry of the Slurm labs of this machine: assigns port ranges and host names, and finds labs whose owner died.

One file per port range; a running lab holds the lock of its file, which the kernel releases however the owner ends. So
a range whose lock is free is unclaimed, or its lab was left behind: `sweep` stops that. The names n1, n2, ... are in
/etc/hosts as long as a running lab needs them.
"""

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REGISTRY = Path(tempfile.gettempdir()) / "llmb-slurm-labs"
PORTS_EACH = 100
FIRST_PORTS = range(17000, 32000, PORTS_EACH)  # below the ephemeral ports of the kernel
HOSTS = Path("/etc/hosts")
MARK = "# slurm lab"


class Claim:
    """Port range reserved until `release`."""

    def __init__(self, port: int, descriptor: int):
        self.port = port
        self._descriptor = descriptor

    def release(self) -> None:
        with _registry_lock():
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            _write_hosts()


def claim(folder: Path, nodes: int, stop_lab: Callable[[Path], None], port: int | None = None) -> Claim:
    """Claim the range that begins at `port`, or any free one, after stopping labs whose owner died."""
    with _registry_lock():
        _sweep(stop_lab)
        for first in FIRST_PORTS if port is None else [port]:
            descriptor = os.open(REGISTRY / str(first), os.O_RDWR | os.O_CREAT, 0o600)
            if _locked(descriptor) and _unused(first):
                os.write(descriptor, json.dumps({"folder": str(folder), "nodes": nodes}).encode())
                _write_hosts()
                return Claim(first, descriptor)
            os.close(descriptor)
    raise RuntimeError("no free range of ports for a Slurm lab" if port is None else f"port {port} is taken")


def sweep(stop_lab: Callable[[Path], None]) -> None:
    """Stop every lab whose owner is gone."""
    with _registry_lock():
        _sweep(stop_lab)
        _write_hosts()


def wait_for_end(port: int) -> None:
    """Wait until the owner of that range has exited and released its lock."""
    with open(REGISTRY / str(port)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def exclusive(resource: str, wait_s: float) -> Iterator[None]:
    """Hold a resource of this machine that one lab at a time can use."""
    REGISTRY.mkdir(exist_ok=True)
    descriptor = os.open(REGISTRY / f"only-{resource}", os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + wait_s
    try:
        while not _locked(descriptor):
            if time.monotonic() > end:
                raise TimeoutError(f"another lab held the {resource} for {wait_s:g} s")
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _registry_lock() -> Iterator[None]:
    REGISTRY.mkdir(exist_ok=True)
    with open(REGISTRY / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(stop_lab: Callable[[Path], None]) -> None:
    for entry in _entries():
        with open(entry, "r+") as file:
            if (text := file.read()) and _locked(file.fileno()):
                stop_lab(Path(json.loads(text)["folder"]))
                file.truncate(0)


def _entries() -> list[Path]:
    return [entry for entry in REGISTRY.iterdir() if entry.name.isdigit()]


def _write_hosts() -> None:
    """Rewrite /etc/hosts in place: in a container it is often a mount, which cannot be replaced."""
    texts = [text for entry in _entries() if (text := entry.read_text())]
    nodes = max((json.loads(text)["nodes"] for text in texts), default=0)
    before = HOSTS.read_text()
    other_lines = [line for line in before.splitlines() if not line.endswith(MARK)]
    after = "\n".join([*other_lines, *(f"127.0.0.1 n{i} {MARK}" for i in range(1, nodes + 1))]) + "\n"
    if after != before:
        with HOSTS.open("r+") as file:  # never empty: ranks of other labs resolve names meanwhile
            file.write(after)
            file.truncate()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unused(first: int) -> bool:
    """Return whether no process outside the registry listens there either."""
    for port in (first + 1, first + 2, first + 11):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True
