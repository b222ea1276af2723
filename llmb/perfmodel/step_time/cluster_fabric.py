"""GPUs whose chip family and network are known, for the step time: rows of `hardware.py`, with what-if changes.

device("gb200").fabric.link_domain       -> 72 GPUs share NVLink
"""

from dataclasses import dataclass

from llmb.errors import UnknownName
from llmb.perfmodel.hardware import GPUS, Fabric, Gpu

# Oldest first.
FABRICS: dict[str, Fabric] = {key: gpu.fabric for key, gpu in reversed(GPUS.items()) if gpu.fabric is not None}


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
