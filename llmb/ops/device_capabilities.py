"""Capabilities of a GPU, read in one place, and what runs instead of each one that it lacks.

    capabilities(x.device).has("cudnn_attention")
    fallback_lines(device, ("cudnn_attention", "pdl"))     one line for each that is missing

LLMB_FORCE_FALLBACK=pdl,cudnn_attention makes a GPU count as one without these, and `all` as one without any: to test
each fallback on a GPU that needs none, and to measure what a feature is worth.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from llmb.errors import ConfigError, UnknownName

FORCE = "LLMB_FORCE_FALLBACK"


class Feature(NamedTuple):
    """A feature of the hardware, or of a package for it, and what the engine does without it."""

    title: str
    instead: str
    compute: tuple[int, int]  # least compute capability
    last_major: int | None = None  # of the compute capability; none: later ones have it, too
    package: str | None = None  # optional one that has it


FEATURES = {
    "triton": Feature("Triton kernels", "plain torch operations", (8, 0)),
    "flash_attention": Feature("FlashAttention-2", "attention in plain torch", (8, 0)),
    "cudnn_attention": Feature("fast cuDNN attention", "FlashAttention-2", (9, 0)),
    "flash_attention_4": Feature("FlashAttention 4", "cuDNN attention", (9, 0), 9, "flash-attn-4"),
    "cudnn_fp8_attention": Feature(
        "fp8 attention of cuDNN", "prefill attention in bf16", (9, 0), 9, "nvidia-cudnn-frontend"
    ),
    "gemm_trial": Feature("trials of GEMM algorithms", "the first algorithm that cuBLASLt proposes", (8, 0)),
    "pdl": Feature("programmatic dependent launch", "small kernels start one after the other", (9, 0)),
    "fp8_gemm": Feature("fp8 GEMMs", "bf16", (8, 9)),
    "fp8_grouped_gemm": Feature("fp8 grouped GEMMs", "experts in bf16", (9, 0), 9),
    "fp8_block_gemm": Feature("block-scaled fp8 GEMMs of cuBLAS", "a Triton kernel", (9, 0), 9),
}
TRAINING_FEATURES = ("triton", "flash_attention", "cudnn_attention", "flash_attention_4", "gemm_trial")
SERVING_FEATURES = ("triton", "pdl")
FP8_ATTENTION_NEEDS = "use a Hopper GPU with the extra cudnn (pip install '.[cudnn]')"
TUNED_SMS = 132  # of the H200 that numbers of programs were chosen on
CUDA_OF_BLOCK_SCALES = (12, 9)  # first version whose cuBLAS takes them


@dataclass(frozen=True, kw_only=True)
class DeviceCapabilities:
    """Compute capability, multiprocessors and shared memory of one device; a CPU has no feature."""

    compute: tuple[int, int] | None  # null: not a CUDA device
    sms: int = 1
    shared_memory_bytes: int | None = None  # that one block may take
    cuda: tuple[int, ...] = ()  # version that torch was built with
    forced: frozenset[str] = frozenset()  # features that count as missing
    packages: frozenset[str] = frozenset()  # optional ones that are installed

    def supports(self, name: str) -> bool:
        """Return whether the hardware and its libraries have a feature, forced fallbacks aside."""
        feature = FEATURES[name]
        if not self._is_in_range(feature) or (name == "fp8_block_gemm" and self.cuda < CUDA_OF_BLOCK_SCALES):
            return False
        return feature.package is None or feature.package in self.packages

    def has(self, name: str) -> bool:
        """Return whether to use a feature."""
        return name not in self.forced and self.supports(name)

    def lines(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return one line for each of these features that is missing, with what runs instead."""
        if self.compute is None:
            return ()
        return tuple(self._line(name) for name in names if not self.has(name))

    def cause(self, name: str) -> str:
        """Return why a feature is not used."""
        feature, (major, minor) = FEATURES[name], self.compute or (0, 0)
        if self.supports(name):
            return FORCE
        if feature.package is not None and self._is_in_range(feature):
            return f"{feature.package} is not installed"
        return f"compute capability {major}.{minor}"

    def _line(self, name: str) -> str:
        feature = FEATURES[name]
        return f"no {feature.title} ({self.cause(name)}): {feature.instead}"

    def _is_in_range(self, feature: Feature) -> bool:
        """Return whether the compute capability is one of those that have a feature."""
        if self.compute is None or self.compute < feature.compute:
            return False
        return feature.last_major is None or self.compute[0] <= feature.last_major


def parse_forced(text: str) -> frozenset[str]:
    """Return the features that LLMB_FORCE_FALLBACK names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return frozenset(FEATURES)
    for name in names:
        if name not in FEATURES:
            raise UnknownName(FORCE, name, [*FEATURES, "all"])
    return frozenset(names)


@cache
def forced_fallbacks() -> frozenset[str]:
    """Return the features that this process does without, read once: kernels ask at every launch."""
    return parse_forced(os.environ.get(FORCE, ""))


@cache
def capabilities(device: torch.device) -> DeviceCapabilities:
    """Return what a device can do."""
    if device.type != "cuda":
        return DeviceCapabilities(compute=None, forced=forced_fallbacks())
    properties = torch.cuda.get_device_properties(device)
    return DeviceCapabilities(
        compute=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        shared_memory_bytes=getattr(properties, "shared_memory_per_block_optin", None),
        cuda=tuple(int(number) for number in (torch.version.cuda or "0.0").split(".")[:2]),
        forced=forced_fallbacks(),
        packages=optional_packages(),
    )


@cache
def optional_packages() -> frozenset[str]:
    """Return the packages that have a feature and are installed."""
    installed = set()
    for name in {feature.package for feature in FEATURES.values() if feature.package is not None}:
        with suppress(PackageNotFoundError):
            version(name)
            installed.add(name)
    return frozenset(installed)


def fallback_lines(device: torch.device, names: Iterable[str]) -> tuple[str, ...]:
    """Return one line for each feature that a run would use and this device lacks."""
    return capabilities(device).lines(names)


@cache
def scaled_to_sms(programs: int, device: torch.device) -> int:
    """Return a number of programs chosen on an H200, scaled to the multiprocessors of a GPU; elsewhere unchanged."""
    gpu = capabilities(device)
    return programs if gpu.compute is None else max(1, programs * gpu.sms // TUNED_SMS)


def check_fp8_attention(device: torch.device) -> None:
    """Refuse attention_dtype=fp8 on a GPU without it."""
    gpu, name = capabilities(device), "cudnn_fp8_attention"
    if gpu.compute is None or gpu.has(name):
        return
    raise ConfigError(
        f"attention_dtype=fp8: no {FEATURES[name].title}, {gpu.cause(name)}; leave it out, or {FP8_ATTENTION_NEEDS}"
    )


def check_dtypes(device: torch.device, **dtypes: str | None) -> None:
    """Refuse dtypes, by name of the setting, that a GPU cannot compute in; name one that it can."""
    gpu = capabilities(device)
    if gpu.compute is None:
        return
    version = ".".join(map(str, gpu.compute))
    for setting, dtype in dtypes.items():
        if dtype == "fp8" and not gpu.has("fp8_gemm"):
            forced = f", and {FORCE} names fp8_gemm" if gpu.supports("fp8_gemm") else ""
            raise ConfigError(
                f"{setting}=fp8 needs a GPU of compute capability 8.9 or more, this one has {version}{forced}; "
                "choose bf16"
            )
        if dtype in ("bf16", "fp8", "nvfp4") and gpu.compute < (8, 0):
            raise ConfigError(
                f"{setting}={dtype} needs a GPU of compute capability 8.0 or more, this one has {version}; choose fp32"
            )
