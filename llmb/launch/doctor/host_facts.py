"""Facts of a host from /proc and /sys: CPUs, NUMA nodes, memory, PCI devices, InfiniBand ports.

`root` is / or a copy of these files, so that tests can describe any machine.
"""

import os
import platform
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmb.formats.cpu_governor import cpu_governors

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers: GPUs, but not their audio or NVSwitches
NO_NODE = -1  # what the kernel says of a device whose NUMA node it does not know


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an InfiniBand or RoCE adapter."""

    name: str  # mlx5_0:1
    state: str  # ACTIVE, DOWN, INIT
    rate: str  # 400 Gb/sec (4X NDR)


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host. Null: unknown."""

    name: str  # as Slurm names the node, else the hostname
    kernel: str
    cpu: str | None = None
    cores: int  # that this process may use
    cores_total: int | None = None
    governors: tuple[str, ...] = ()
    numa_nodes: int | None = None
    numa_balancing: bool | None = None
    gpu_numa: dict[str, int] | None = None  # PCI address of an NVIDIA GPU -> NUMA node
    memory_bytes: int | None = None
    shm_bytes: int | None = None  # /dev/shm
    memlock_bytes: int | None = None  # memory that a process may lock; null: any amount
    ports: tuple[Port, ...] = ()


def host_facts(environ: Mapping[str, str], root: Path = Path("/")) -> HostFacts:
    """Return the facts of this host."""
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    balancing = _read(root / "proc/sys/kernel/numa_balancing")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return HostFacts(
        name=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        kernel=platform.release(),
        cpu=_after(root / "proc/cpuinfo", "model name"),
        cores=len(os.sched_getaffinity(0)),
        cores_total=os.cpu_count(),
        governors=cpu_governors(root),
        numa_nodes=nodes or None,
        numa_balancing=None if balancing is None else balancing != "0",
        gpu_numa=_gpu_numa(root),
        memory_bytes=_kib(_after(root / "proc/meminfo", "MemTotal")),
        shm_bytes=_size(root / "dev/shm"),
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        ports=_ports(root),
    )


def _gpu_numa(root: Path) -> dict[str, int]:
    """Return the NUMA node of each NVIDIA GPU on the PCI bus, whether or not a driver is loaded."""
    nodes = {}
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = (_read(device / "class") or "")[:6]
        if _read(device / "vendor") == NVIDIA_VENDOR and kind in DISPLAY_CLASSES:
            node = _read(device / "numa_node")
            nodes[device.name] = int(node) if node is not None else NO_NODE
    return nodes


def _ports(root: Path) -> tuple[Port, ...]:
    folders = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return tuple(
        Port(
            name=f"{folder.parent.parent.name}:{folder.name}",
            state=(_read(folder / "state") or "unknown").partition(": ")[2] or "unknown",  # 4: ACTIVE
            rate=_read(folder / "rate") or "unknown",
        )
        for folder in folders
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _after(path: Path, name: str) -> str | None:
    """Return what follows `name:` in a file."""
    lines = (_read(path) or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _kib(text: str | None) -> int | None:
    digits = (text or "").partition(" ")[0]
    return int(digits) << 10 if digits.isdigit() else None


def _size(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize
