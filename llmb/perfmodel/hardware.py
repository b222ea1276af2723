"""Table of GPUs: peak FLOP/s per dtype, memory, bandwidths, links between GPUs, and the source of the figures.

Peaks are dense (no structured sparsity), in FLOP/s. A new GPU is one row. Unpublished figures are null: an MFU against
a guessed peak would be worse than none. A GPU without a row runs too, under its driver's name (rtx-4090, h100-pcie):
its peaks are null and its memory is what the driver reports.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmb.errors import ConfigError

if TYPE_CHECKING:  # spec.py is slow to import
    from llmb.config.spec import Machine

TERA = 1e12
GB = 1e9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Chip family, power and network of one type of GPU: what the time of a training step depends on besides peaks."""

    family: str  # ampere, hopper, blackwell: efficiencies are fitted per family
    sms: int  # streaming multiprocessors: GEMM tiles computed at once
    watts: float  # nominal power limit
    link_domain: int  # GPUs that share NVLink
    network: float  # bytes/s per GPU and direction, between link domains: one NIC per GPU
    clock: float = 1.0  # sustained under load, relative to the family's at equal nominal peak
    grace: bool = False  # launched by a Grace CPU, whose cores are slower than those of x86 servers


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One type of accelerator."""

    key: str
    title: str
    peak_flops: dict[str, float] = field(default_factory=dict)  # dtype -> FLOP/s
    memory_bytes: float | None = None  # as CUDA reports it, which is more than the nominal GB; nominal where not known
    memory_bandwidth: float | None = None  # bytes/s
    link_bandwidth: float | None = None  # GPU to GPU inside a node, bytes/s per direction
    host_bandwidth: float | None = None  # host to device, bytes/s per direction
    gpus_per_node: int = 8
    fabric: Fabric | None = None
    source: str
    name_words: tuple[str, ...] = ()  # words that identify the driver's device name


def _peaks(
    bf16: float, fp8: float | None = None, nvfp4: float | None = None, fp32: float | None = None
) -> dict[str, float]:
    peaks = {"bf16": bf16, "fp8": fp8, "nvfp4": nvfp4, "fp32": fp32}
    return {dtype: value * TERA for dtype, value in peaks.items() if value is not None}


# The nominal peaks of GB200 and GB300 are higher than those of B200 and B300 by their boost clock, which no long GEMM
# sustains on either; power limits make the difference. MLPerf Training v5.1, Llama 3.1 8B on 8 GPUs, minutes: B200
# 84.4, GB200 79.3, B300 75.8, GB300 67.4.
GB_CLOCK = 2450 / 2250
B200_CLOCK, B300_CLOCK = GB_CLOCK * 79.3 / 84.4, GB_CLOCK * 67.4 / 75.8
# Fabrics: NVIDIA data sheets of A100, H100, H200, DGX B200, DGX B300, GB200 NVL72, GB300 NVL72.
_RECIPES = "NVIDIA dgxc-benchmarking, recipe READMEs (dense peaks); memory as CUDA reports it (B300, GB300: nominal)"

GPUS: dict[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        Gpu(key="gb300", title="NVIDIA GB300", peak_flops=_peaks(2450, 4900, 14700), memory_bytes=288 * GB,
            memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=450 * GB, gpus_per_node=4,
            fabric=Fabric(family="blackwell-ultra", sms=148, watts=1400, link_domain=72,
                          network=100 * GB, grace=True),
            source=_RECIPES, name_words=("gb300",)),
        Gpu(key="gb200", title="NVIDIA GB200", peak_flops=_peaks(2450, 4900, 9800), memory_bytes=184.3 * GIB,
            memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=450 * GB, gpus_per_node=4,
            fabric=Fabric(family="blackwell", sms=148, watts=1200, link_domain=72,
                          network=50 * GB, grace=True),
            source=_RECIPES, name_words=("gb200",)),
        Gpu(key="b300", title="NVIDIA B300", peak_flops=_peaks(2250, 4500, 13500), memory_bytes=288 * GB,
            memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=64 * GB,
            fabric=Fabric(family="blackwell-ultra", sms=148, watts=1100, link_domain=8,
                          network=100 * GB, clock=B300_CLOCK),
            source=_RECIPES, name_words=("b300",)),
        Gpu(key="b200", title="NVIDIA B200", peak_flops=_peaks(2250, 4500, 9000), memory_bytes=178.3 * GIB,
            memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=64 * GB,
            fabric=Fabric(family="blackwell", sms=148, watts=1000, link_domain=8,
                          network=50 * GB, clock=B200_CLOCK),
            source=_RECIPES, name_words=("b200",)),
        Gpu(key="h200", title="NVIDIA H200 SXM", peak_flops=_peaks(989, 1979, fp32=67), memory_bytes=139 * GIB,
            memory_bandwidth=4800 * GB, link_bandwidth=450 * GB, host_bandwidth=64 * GB,
            fabric=Fabric(family="hopper", sms=132, watts=700, link_domain=8, network=50 * GB),
            source="NVIDIA H200 data sheet, dense; driver-reported memory (nominally 141 GB)", name_words=("h200",)),
        Gpu(key="h100", title="NVIDIA H100 SXM", peak_flops=_peaks(989, 1979, fp32=67), memory_bytes=79.1 * GIB,
            memory_bandwidth=3350 * GB, link_bandwidth=450 * GB, host_bandwidth=64 * GB,
            fabric=Fabric(family="hopper", sms=132, watts=700, link_domain=8, network=50 * GB),
            source=_RECIPES, name_words=("h100",)),
        Gpu(key="a100", title="NVIDIA A100 SXM 80 GB", peak_flops=_peaks(312, fp32=19.5), memory_bytes=79.1 * GIB,
            memory_bandwidth=2039 * GB, link_bandwidth=300 * GB, host_bandwidth=32 * GB,
            fabric=Fabric(family="ampere", sms=108, watts=400, link_domain=8, network=25 * GB),
            source="NVIDIA A100 data sheet, dense", name_words=("a100",)),
        Gpu(key="cpu", title="this machine's CPU", gpus_per_node=1024,
            source="no published peak: MFU is null"),
    )
}  # fmt: skip


UNLISTED = "unlisted:"  # --gpu-type unlisted:l40s: so that a misspelt type is not taken for a GPU without a row
KEY = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")  # part of file names
# Words of a device name that say nothing about peaks: maker, form factor, kind of memory, cooling.
NEUTRAL_WORD = re.compile(r"nvidia|sxm\d?|hbm\d?e?|ac|lc")
MEMORY_WORD = re.compile(r"(\d+)gb")
MEMORY_TOLERANCE = 0.1  # nominal sizes are rounded: 141 GB, 139 GiB


def is_listed(key: str) -> bool:
    """Return whether a GPU type has a row in the table."""
    return key in GPUS


def gpu(key: str) -> Gpu:
    """Return the row of one GPU type; for a GPU that is not in the table, a row of nulls."""
    unlisted = "not in the table of GPUs: peaks, bandwidths and MFU are null"
    return GPUS[key] if is_listed(key) else Gpu(key=key, title=f"{key} (not in the GPU table)", source=unlisted)


def parse_gpu_type(text: str, more: Iterable[str] = ()) -> str:
    """Return the GPU type that a user names: a row of the table, one of `more`, or `unlisted:NAME`."""
    key = text.strip().lower()
    name = key.removeprefix(UNLISTED)
    if key in GPUS or key in more:
        return key
    if key != name and KEY.fullmatch(name):
        return name
    example = f"{UNLISTED}{name}" if KEY.fullmatch(name) else f"{UNLISTED}NAME"
    raise ConfigError(
        f"unknown GPU type {text!r}; choices are: {', '.join(GPUS)}; name a GPU that is not among them as {example}"
    )


def peak_flops(key: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one GPU for a dtype; None if unpublished."""
    return gpu(key).peak_flops.get(dtype)


def memory_bytes(machine: "Machine") -> float | None:
    """Return the memory of one GPU: the table's, or else what its driver reported; None if unknown."""
    return gpu(machine.gpu).memory_bytes or machine.gpu_memory_bytes


def identify_gpu(device_name: str) -> str | None:
    """Return the key for a driver's device name ('NVIDIA H200' -> h200); None for a GPU that is not in the table.

    Variants with another peak, bandwidth or memory (PCIe, NVL, A100 40 GB, MIG) do not match: every word must be known.
    """
    words = set(_words(device_name))
    for row in GPUS.values():
        if words & set(row.name_words) and all(_describes(word, row) for word in words - set(row.name_words)):
            return row.key
    return None


def gpu_key(device_name: str) -> str:
    """Return the GPU type of a device: its key in the table, or else its name ('NVIDIA H100 PCIe' -> h100-pcie)."""
    name = "-".join(word for word in _words(device_name) if word not in ("nvidia", "geforce"))
    return identify_gpu(device_name) or re.sub(r"[^a-z0-9.-]", "", name)[:40].strip("-.") or "gpu"


def with_article(gpu: str) -> str:
    """Return a GPU type with the article it is spoken with: an h100, a b200, an rtx-4090."""
    return f"{'an' if gpu[:1] in 'aefhilmnorsx8' else 'a'} {gpu}"


def _words(device_name: str) -> list[str]:
    return re.sub(r"(\d+) gb\b", r"\1gb", re.sub(r"[-_ ]+", " ", device_name.lower())).split()


def _describes(word: str, row: Gpu) -> bool:
    """Return whether a word of a device name is true of the row: neutral, or its memory size."""
    size = MEMORY_WORD.fullmatch(word)
    if size and row.memory_bytes:
        return abs(int(size[1]) * GB / row.memory_bytes - 1) < MEMORY_TOLERANCE
    return NEUTRAL_WORD.fullmatch(word) is not None
