"""Provenance of a run, recorded as its first event: device, its power limit and clocks, versions, commit."""

import os
import platform
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import llmb
from llmb.events import RunStarted
from llmb.formats.device_facts import device_facts
from llmb.runtime.rank_info import RankInfo

OPTIONAL = ("flash-attn-4", "nvidia-cudnn-frontend")  # packages that change the speed of a run where they are installed
HOST = "LLMB_HOST"  # set by the launcher where its name of this machine differs from the hostname


def run_started(rank_info: RankInfo, fallbacks: tuple[str, ...] = ()) -> RunStarted:
    """Return the first event of this rank; print what runs in place of what its device lacks."""
    if rank_info.rank == 0:
        for line in fallbacks:
            print(f"fallback: {line}", flush=True)
    return RunStarted(
        time=time.time(),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        gpu_name=device_name(rank_info.device),
        host=os.environ.get(HOST) or socket.gethostname(),
        pid=os.getpid(),
        commit=commit() if rank_info.rank == 0 else None,  # with a thousand ranks not every one needs to call git
        versions=versions(),
        device=asdict(device_facts(device_uuid(rank_info.device))),
        fallbacks=fallbacks,
    )


def device_name(device: torch.device) -> str | None:
    """Return the GPU name given by the driver, or the CPU model given by Linux; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def device_uuid(device: torch.device) -> str | None:
    """Return the UUID of a GPU, by which nvidia-smi knows it whatever CUDA_VISIBLE_DEVICES says; None of a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def versions() -> dict[str, str]:
    """Return the versions that affect results; CUDA only where torch was built with it."""
    packages = {"llmb": llmb.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        packages["cuda"] = torch.version.cuda
    for name in OPTIONAL:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return packages


def commit() -> str | None:
    """Return the commit of llmb's checkout, ending in -dirty if files differ; None if installed otherwise."""
    package = Path(llmb.__file__).resolve().parent
    if _git(package, "rev-parse", "--show-toplevel") != str(package.parent):
        return None  # not a checkout, or a virtual environment inside another one
    return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
