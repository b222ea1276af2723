"""All facts that doctor looks at, of one machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmb.formats.nvidia_smi import NO_PROGRAM, GpuStatus, query_gpus
from llmb.launch.doctor.disk_facts import DiskFacts, disk_facts
from llmb.launch.doctor.host_facts import HostFacts, host_facts
from llmb.launch.doctor.software_facts import SoftwareFacts, software_facts
from llmb.launch.install_root import install_root


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """One machine."""

    host: HostFacts
    software: SoftwareFacts
    disks: tuple[DiskFacts, ...]  # $LLMB_INSTALL, the cache of Hugging Face
    gpus: tuple[GpuStatus, ...] = ()
    gpu_error: str | None = None  # message of nvidia-smi when it failed; null where it is not installed


def machine_facts(environ: Mapping[str, str]) -> MachineFacts:
    """Collect the facts of this machine; takes about a second."""
    gpus, error = query_gpus()
    return MachineFacts(
        host=host_facts(environ),
        software=software_facts(environ),
        disks=tuple(disk_facts(folder) for folder in _folders(environ)),
        gpus=tuple(gpus),
        gpu_error=None if error == NO_PROGRAM else error,
    )


def _folders(environ: Mapping[str, str]) -> list[Path]:
    cache = environ.get("HF_HOME") or Path(environ.get("HOME", "/"), ".cache", "huggingface")
    return [install_root(environ), Path(cache).absolute()]
