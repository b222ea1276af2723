"""One row of the table of GPUs. Null: not published, so that nothing is computed from a guess."""

from dataclasses import dataclass, field

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
    network: float | None = None  # bytes/s per GPU and direction, between link domains: one NIC per GPU
    clock: float = 1.0  # sustained under load, relative to the family's at equal nominal peak
    grace: bool = False  # launched by a Grace CPU, whose cores are slower than those of x86 servers


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One type of accelerator."""

    key: str
    title: str
    peak_flops: dict[str, float] = field(default_factory=dict)  # dtype -> FLOP/s, dense
    memory_bytes: float | None = None  # as CUDA reports it, which differs from the nominal GB; nominal where not known
    memory_bandwidth: float | None = None  # bytes/s
    link_bandwidth: float | None = None  # GPU to GPU inside a node, NVLink or PCIe, bytes/s per direction
    host_bandwidth: float | None = None  # host to device, bytes/s per direction
    gpus_per_node: int = 8
    fabric: Fabric | None = None
    source: str
    name_words: tuple[str, ...] = ()  # words that the driver's device name has
    more_words: tuple[str, ...] = ()  # words that it may have


def peaks(
    bf16: float, fp8: float | None = None, nvfp4: float | None = None, fp32: float | None = None
) -> dict[str, float]:
    """Return dense peaks in FLOP/s from published TFLOP/s; what is not published has no key."""
    published = {"bf16": bf16, "fp8": fp8, "nvfp4": nvfp4, "fp32": fp32}
    return {dtype: value * TERA for dtype, value in published.items() if value is not None}
