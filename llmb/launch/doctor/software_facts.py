"""Software of a host: torch, NCCL, Slurm, container runtimes, and which tokens are there (never their values).

Versions come from the metadata of packages: importing torch takes seconds, and doctor must be quick on a login node.
"""

import os
import platform
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmb.launch.secrets import mask
from llmb.launch.slurm.slurm_command import SlurmUnavailable, run_slurm

RUNTIMES = ("enroot", "docker", "podman", "apptainer", "singularity")
TOKENS = ("HF_TOKEN", "NGC_API_KEY", "WANDB_API_KEY")
OLDER_NAMES = {"HF_TOKEN": ("HUGGING_FACE_HUB_TOKEN",)}
CUDA_SUFFIX = re.compile(r"\+cu(\d+)(\d)$")  # of torch's version: 2.11.0+cu128


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """Installed software. Null: not installed, or unknown."""

    python: str
    torch: str | None = None
    torch_cuda: str | None = None  # that torch was built for: 12.8 or 12; cpu: none
    nccl: str | None = None
    nccl_settings: dict[str, str] = field(default_factory=dict)  # variables NCCL_*
    slurm: str | None = None
    slurm_error: str | None = None  # Slurm is installed and does not respond
    containers: tuple[str, ...] = ()  # runtimes; pyxis: srun has --container-image
    tokens: dict[str, bool] = field(default_factory=dict)  # present


def software_facts(environ: Mapping[str, str]) -> SoftwareFacts:
    """Return what is installed for this Python and on the PATH."""
    slurm, slurm_error = _slurm()
    return SoftwareFacts(
        python=platform.python_version(),
        torch=_version("torch"),
        torch_cuda=_torch_cuda(),
        nccl=_version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12"),
        nccl_settings=mask({name: environ[name] for name in sorted(environ) if name.startswith("NCCL_")}),
        slurm=slurm,
        slurm_error=slurm_error,
        containers=_containers(slurm is not None),
        tokens={name: has_token(name, environ) for name in TOKENS},
    )


def has_token(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a token is set, or for Hugging Face stored by its login command."""
    if any(environ.get(variable) for variable in (name, *OLDER_NAMES.get(name, ()))):
        return True
    if name != "HF_TOKEN":
        return False
    home = environ.get("HF_HOME") or os.path.join(environ.get("HOME", ""), ".cache", "huggingface")
    try:
        return Path(environ.get("HF_TOKEN_PATH") or Path(home, "token")).stat().st_size > 0
    except OSError:
        return False


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for: of its version, or of the CUDA packages beside it."""
    torch = _version("torch")
    if torch is None:
        return None
    if suffix := CUDA_SUFFIX.search(torch):
        return f"{suffix[1]}.{suffix[2]}"
    runtime = _version("nvidia-cuda-runtime") or _version("nvidia-cuda-runtime-cu12")
    if runtime is not None and not torch.endswith("+cpu"):
        return ".".join(runtime.split(".")[:2])
    return "cpu" if torch.endswith("+cpu") else None


def _slurm() -> tuple[str | None, str | None]:
    """Return the version of Slurm, and why it does not respond."""
    if shutil.which("sinfo") is None:
        return None, None
    try:
        name = run_slurm(["sinfo", "--version"]).stdout.strip().removeprefix("slurm-wlm ").removeprefix("slurm ")
    except SlurmUnavailable:
        name = ""
    try:
        output = run_slurm(["sinfo", "--noheader", "--format=%P"])
        error = (output.stderr or f"sinfo exit {output.exit_code}") if output.exit_code else None
    except SlurmUnavailable as unavailable:
        error = str(unavailable).rpartition("; ")[2]  # libraries that it asked in vain come first
    return name or "unknown version", error


def _containers(has_slurm: bool) -> tuple[str, ...]:
    present = [name for name in RUNTIMES if shutil.which(name) is not None]
    if has_slurm and shutil.which("srun") is not None:
        with suppress(SlurmUnavailable):
            present += ["pyxis"] * ("--container-image" in run_slurm(["srun", "--help"]).stdout)
    return tuple(present)
