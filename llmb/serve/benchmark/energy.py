"""Energy of this rank's GPU during a block: from the driver's counter, and from sampled power as a cross-check.

    with EnergyMeter(sampler) as meter:
        ...
    meter.energy.joules

Counter and samples (`runtime/gpu_sampler.py`) measure the same quantity, so a reader can tell whether to trust it.
Where there is no counter the energy is null and the note says why.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmb.runtime.gpu_sampler import GpuSampler

MAX_GAP_S = 3.0  # between two samples that may be integrated


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of one GPU in one block. None: unknown."""

    joules: float | None = None  # from the counter
    power_joules: float | None = None  # from the samples
    mean_power_w: float | None = None  # from the counter
    note: str | None = None  # why it is unknown


class EnergyMeter:
    """Context manager that reads the counter at both ends, where it takes a sample too; all between are measured."""

    def __init__(self, sampler: GpuSampler):
        self.energy = Energy(note="the block has not ended")
        self._sampler = sampler
        self._began = 0.0
        self._first_sample = 0
        self._start_joules: float | None = None

    def __enter__(self) -> "EnergyMeter":
        self._sampler.measured = True
        self._first_sample = len(self._sampler.powers)
        self._start_joules, self._began = self._counter(), time.perf_counter()
        self._sampler.sample()
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.sample()
        end_joules, seconds = self._counter(), time.perf_counter() - self._began
        self._sampler.measured = False
        if self._start_joules is None or end_joules is None:
            self.energy = Energy(note=f"no energy counter: {self._sampler.note or 'the GPU has none'}")
            return
        joules = end_joules - self._start_joules
        integrated = integrate_power(self._sampler.powers[self._first_sample :])
        self.energy = Energy(joules=joules, power_joules=integrated, mean_power_w=joules / seconds)

    def _counter(self) -> float | None:
        return None if self._sampler.gpu is None else self._sampler.gpu.energy_joules()


def integrate_power(samples: Sequence[tuple[float, float]]) -> float | None:
    """Return the joules of (seconds, watts) samples by the trapezoidal rule; None if they are too far apart."""
    gaps = [after[0] - before[0] for before, after in pairwise(samples)]
    if not gaps or max(gaps) > MAX_GAP_S:
        return None
    means = ((before[1] + after[1]) / 2 for before, after in pairwise(samples))
    return sum(gap * mean for gap, mean in zip(gaps, means, strict=True))
