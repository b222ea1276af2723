"""Table of GPUs: peak FLOP/s per dtype, memory, bandwidths, GPUs per node, and the source of the figures.

Peaks are dense (no structured sparsity), in FLOP/s. A new GPU is one row. Unpublished figures are null: an MFU against
a guessed peak would be worse than none.
"""

from dataclasses import dataclass, field

from llmb.errors import UnknownName

TERA = 1e12
GB = 1e9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One type of accelerator."""

    key: str
    title: str
    peak_flops: dict[str, float] = field(default_factory=dict)  # dtype -> FLOP/s
    memory_bytes: float | None = None  # nominal unless `source` says otherwise; a driver may report a little more
    memory_bandwidth: float | None = None  # bytes/s
    link_bandwidth: float | None = None  # GPU to GPU inside a node, bytes/s per direction
    host_bandwidth: float | None = None  # host to device, bytes/s per direction
    gpus_per_node: int = 8
    source: str
    name_words: tuple[str, ...] = ()  # words that identify the driver's device name


def _peaks(
    bf16: float, fp8: float | None = None, nvfp4: float | None = None, fp32: float | None = None
) -> dict[str, float]:
    peaks = {"bf16": bf16, "fp8": fp8, "nvfp4": nvfp4, "fp32": fp32}
    return {dtype: value * TERA for dtype, value in peaks.items() if value is not None}


_RECIPES = "NVIDIA dgxc-benchmarking, recipe READMEs (dense peaks, minimum memory)"

GPUS: dict[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        Gpu(key="gb300", title="NVIDIA GB300", peak_flops=_peaks(2450, 4900, 14700), memory_bytes=288 * GB,
            memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=450 * GB, gpus_per_node=4,
            source=_RECIPES, name_words=("gb300",)),
        Gpu(key="gb200", title="NVIDIA GB200", peak_flops=_peaks(2450, 4900, 9800), memory_bytes=186 * GB,
            memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=450 * GB, gpus_per_node=4,
            source=_RECIPES, name_words=("gb200",)),
        Gpu(key="b300", title="NVIDIA B300", peak_flops=_peaks(2250, 4500, 13500), memory_bytes=288 * GB,
            memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=64 * GB,
            source=_RECIPES, name_words=("b300",)),
        Gpu(key="b200", title="NVIDIA B200", peak_flops=_peaks(2250, 4500, 9000), memory_bytes=180 * GB,
            memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=64 * GB,
            source=_RECIPES, name_words=("b200",)),
        Gpu(key="h200", title="NVIDIA H200 SXM", peak_flops=_peaks(989, 1979, fp32=67), memory_bytes=139 * GIB,
            memory_bandwidth=4800 * GB, link_bandwidth=450 * GB, host_bandwidth=64 * GB,
            source="NVIDIA H200 data sheet, dense; driver-reported memory (nominally 141 GB)", name_words=("h200",)),
        Gpu(key="h100", title="NVIDIA H100 SXM", peak_flops=_peaks(989, 1979, fp32=67), memory_bytes=80 * GB,
            memory_bandwidth=3350 * GB, link_bandwidth=450 * GB, host_bandwidth=64 * GB,
            source=_RECIPES, name_words=("h100",)),
        Gpu(key="a100", title="NVIDIA A100 SXM 80 GB", peak_flops=_peaks(312, fp32=19.5), memory_bytes=80 * GB,
            memory_bandwidth=2039 * GB, link_bandwidth=300 * GB, host_bandwidth=32 * GB,
            source="NVIDIA A100 data sheet, dense", name_words=("a100",)),
        Gpu(key="cpu", title="this machine's CPU", gpus_per_node=1024,
            source="no published peak: MFU is null"),
    )
}  # fmt: skip


def gpu(key: str) -> Gpu:
    """Return the row of one GPU type."""
    if key not in GPUS:
        raise UnknownName("GPU type", key, GPUS)
    return GPUS[key]


def peak_flops(key: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one GPU for a dtype; None if unpublished."""
    return gpu(key).peak_flops.get(dtype)


def identify_gpu(device_name: str) -> str | None:
    """Return the key for a driver's device name ('NVIDIA H200' -> h200); None for a GPU that is not in the table.

    Variants with another peak or bandwidth (PCIe, NVL, A100 40 GB) do not match.
    """
    words = set(device_name.lower().replace("-", " ").split())
    if words & {"pcie", "nvl", "40gb"}:
        return None
    return next((g.key for g in GPUS.values() if words & set(g.name_words)), None)
