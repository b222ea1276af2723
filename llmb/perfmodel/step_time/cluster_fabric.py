"""GPU properties that the step time depends on and `hardware.py` does not list: SMs, power, links between GPUs.

fabric("gb200").link_domain       -> 72 GPUs share NVLink
"""

from dataclasses import dataclass

from llmb.errors import UnknownName
from llmb.perfmodel.hardware import GB, GPUS, Gpu


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Chip family, power and network of one type of GPU."""

    family: str  # ampere, hopper, blackwell: efficiencies are fitted per family
    sms: int  # streaming multiprocessors: GEMM tiles computed at once
    watts: float  # nominal power limit
    link_domain: int  # GPUs that share NVLink
    network: float  # bytes/s per GPU and direction, between link domains
    clock: float = 1.0  # sustained under load, relative to the family's at equal nominal peak


# NVIDIA data sheets: A100, H100, H200, DGX B200, DGX B300, GB200 NVL72, GB300 NVL72 (one NIC per GPU)
# The nominal peaks of GB200 and GB300 are higher than those of B200 and B300 by their boost clock, which no long GEMM
# sustains on either.
GB_CLOCK = 2450 / 2250
FABRICS: dict[str, Fabric] = {
    "a100": Fabric(family="ampere", sms=108, watts=400, link_domain=8, network=25 * GB),
    "h100": Fabric(family="hopper", sms=132, watts=700, link_domain=8, network=50 * GB),
    "h200": Fabric(family="hopper", sms=132, watts=700, link_domain=8, network=50 * GB),
    "b200": Fabric(family="blackwell", sms=148, watts=1000, link_domain=8, network=50 * GB, clock=GB_CLOCK),
    "gb200": Fabric(family="blackwell", sms=148, watts=1200, link_domain=72, network=50 * GB),
    "b300": Fabric(family="blackwell-ultra", sms=148, watts=1100, link_domain=8, network=100 * GB, clock=GB_CLOCK),
    "gb300": Fabric(family="blackwell-ultra", sms=148, watts=1400, link_domain=72, network=100 * GB),
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU with its links, after what-if changes."""

    key: str
    gpu: Gpu
    fabric: Fabric

    @property
    def memory_bandwidth(self) -> float:
        assert self.gpu.memory_bandwidth is not None
        return self.gpu.memory_bandwidth

    @property
    def link_bandwidth(self) -> float:
        assert self.gpu.link_bandwidth is not None
        return self.gpu.link_bandwidth


def device(key: str) -> Device:
    """Return the GPU and its links; unknown types list the known ones."""
    if key not in FABRICS:
        raise UnknownName("GPU type", key, FABRICS)
    return Device(key=key, gpu=GPUS[key], fabric=FABRICS[key])
