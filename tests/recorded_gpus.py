"""Machines described by files in the form of nvidia-smi's output, and a fake nvidia-smi that prints them.

The files under tests/golden/nvidia_smi are written by hand with the elements of drivers 470 and 570; no machine was as
sick as the one of sick.xml.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmb.formats.nvidia_smi import GpuStatus, parse_gpus, with_links
from llmb.launch.doctor.disk_facts import DiskFacts
from llmb.launch.doctor.host_facts import HostFacts
from llmb.launch.doctor.machine_facts import MachineFacts
from llmb.launch.doctor.software_facts import SoftwareFacts

FOLDER = Path(__file__).parent / "golden" / "nvidia_smi"
# `-i` is ignored: every query shows all GPUs. $SICK_NODE has the other recording.
SCRIPT = """#!/bin/sh
name={name}
test "$SLURMD_NODENAME" = {sick_node} && name=sick
case "$1" in
    -q) exec cat {folder}/$name.xml ;;
    nvlink) exec cat {folder}/$name.nvlink ;;
    *) exit 6 ;;
esac
"""


def recorded_gpus(name: str) -> list[GpuStatus]:
    """Return the GPUs of a recording: h200, sick or rtx3090."""
    gpus = parse_gpus((FOLDER / f"{name}.xml").read_text())
    links = FOLDER / f"{name}.nvlink"
    return with_links(gpus, links.read_text()) if links.exists() else gpus


def machine(name: str | None = "h200", **changes: object) -> MachineFacts:
    """Return a machine with recorded GPUs and a healthy host; `changes` are fields of its HostFacts."""
    gpus = tuple(recorded_gpus(name)) if name else ()
    host = HostFacts(
        name="n1", kernel="6.8.0", cpu="Xeon", cores=192, cores_total=192, governors=("performance",), numa_nodes=2,
        numa_balancing=False, gpu_numa={str(gpu.pci_bus): i for i, gpu in enumerate(gpus)}, memory_bytes=2 << 40,
        shm_bytes=1 << 40,
    )  # fmt: skip
    software = SoftwareFacts(
        python="3.12.3", torch="2.11.0+cu128", torch_cuda="12.8", nccl="2.27.5", slurm="24.11.5",
        containers=("enroot", "pyxis"), tokens={"HF_TOKEN": True},
    )  # fmt: skip
    disk = DiskFacts(path="/lustre/llmb", filesystem="lustre", free_bytes=10**13, total_bytes=10**14, writable=True)
    return MachineFacts(host=replace(host, **changes), software=software, disks=(disk,), gpus=gpus)  # type: ignore[arg-type]


def install_fake_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str = "h200", sick_node: str = "-") -> None:
    """Put a fake nvidia-smi first on the PATH; `sick_node`: the Slurm node with the recording `sick`."""
    folder.mkdir(exist_ok=True)
    script = folder / "nvidia-smi"
    script.write_text(SCRIPT.format(name=name, sick_node=sick_node, folder=FOLDER))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
