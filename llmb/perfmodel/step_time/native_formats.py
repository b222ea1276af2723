"""Number formats of the native engine's training, which its memory traffic and the rate of its GEMMs depend on.

native_formats(config).update_bytes     -> bytes per parameter that the optimizer reads and writes
"""

from dataclasses import dataclass
from typing import Any

from llmb.config.spec import RunConfig, Training
from llmb.perfmodel.params import BYTES
from llmb.perfmodel.shards import gradient_bytes


@dataclass(frozen=True, kw_only=True)
class NativeFormats:
    """Bytes per value of weights, moments and gradients, and accumulation; the defaults are those of a run."""

    master_bytes: float = BYTES["fp32"]
    moment_bytes: float = BYTES["fp32"]
    gradient_bytes: float = BYTES["fp32"]
    fp8_fast_accum: bool = False  # of backward GEMMs

    @property
    def update_bytes(self) -> float:
        """Weights and two moments read and written, gradients read for their norm and for the update."""
        return 2 * self.master_bytes + 4 * self.moment_bytes + 2 * self.gradient_bytes

    def fields(self) -> dict[str, Any]:
        """Return the fields of Training that these formats are."""
        names = {BYTES["fp32"]: "fp32", BYTES["bf16"]: "bf16"}
        sizes = {"master_weights": self.master_bytes, "moments": self.moment_bytes, "gradients": self.gradient_bytes}
        return {"fp8_fast_accum": self.fp8_fast_accum} | {name: names[size] for name, size in sizes.items()}


def native_formats(config: RunConfig) -> NativeFormats:
    """Return the formats of a resolved training run."""
    work = config.workload
    assert isinstance(work, Training)
    return NativeFormats(
        master_bytes=BYTES[work.master_weights],
        moment_bytes=BYTES[work.moments],
        gradient_bytes=float(gradient_bytes(config)),
        fp8_fast_accum=work.fp8_fast_accum,
    )
