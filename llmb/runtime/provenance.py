"""Who measures: the device's name, the versions and the commit, as the first event of a run."""

import os
import platform
import socket
import subprocess
import time
from pathlib import Path

import torch

import llmb
from llmb.events import RunStarted
from llmb.runtime.rank_info import Place

HOST = "LLMB_HOST"  # what whoever started the ranks calls this machine, where it has another name there


def run_started(place: Place) -> RunStarted:
    """The first event of this rank."""
    return RunStarted(
        time=time.time(),
        rank=place.rank,
        world_size=place.world_size,
        gpu_name=device_name(place.device),
        host=os.environ.get(HOST) or socket.gethostname(),
        pid=os.getpid(),
        commit=commit() if place.rank == 0 else None,  # a thousand ranks need not all ask git
        versions=versions(),
    )


def device_name(device: torch.device) -> str | None:
    """As the driver prints it, or the CPU's model as Linux prints it; null where neither does."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def versions() -> dict[str, str]:
    """What could change the result; CUDA only where torch was built with it."""
    known = {"llmb": llmb.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return known | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def commit() -> str | None:
    """The commit of llmb's own checkout, ending in -dirty when files differ from it; null when installed otherwise."""
    package = Path(llmb.__file__).resolve().parent
    if _git(package, "rev-parse", "--show-toplevel") != str(package.parent):
        return None  # no checkout, or an environment inside somebody else's
    return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
