"""GPUs whose chip family and network are known, for the step time: rows of `hardware.py`, with what-if changes.

device("gb200").fabric.link_domain       -> 72 GPUs share NVLink
"""

from dataclasses import dataclass

from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.hardware import GPUS, Fabric, Gpu

FAMILIES = ("ampere", "hopper", "blackwell", "blackwell-ultra")  # whose efficiencies are fitted to published rows
# Oldest first.
FABRICS: dict[str, Fabric] = {
    key: gpu.fabric for key, gpu in reversed(GPUS.items()) if gpu.fabric is not None and gpu.fabric.family in FAMILIES
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

    @property
    def network(self) -> float:
        if self.fabric.network is None:
            most = self.fabric.link_domain
            between, possible = (f"link domains of {most}", f"{most} GPUs") if most > 1 else ("GPUs", "one GPU")
            raise ConfigError(
                f"the network between {between} of type {self.key} is not known: at most {possible} can be predicted"
            )
        return self.fabric.network


def device(key: str) -> Device:
    """Return the GPU and its links; unknown types list the known ones."""
    if key in GPUS and key not in FABRICS and key != "cpu":
        raise ConfigError(
            f"{key}: what its family sustains of its peaks is not known, so its data sheet predicts nothing; on such a "
            "machine `llmb-run probe` measures it, and predictions use that; "
            f"GPU types are: {', '.join(FABRICS)}"
        )
    if key not in FABRICS:
        raise UnknownName("GPU type", key, FABRICS)
    return Device(key=key, gpu=GPUS[key], fabric=FABRICS[key])
