"""What this rank's GPU consumed during a span: the driver's own counter, and beside it the power sampled meanwhile.

    with EnergyMeter(device) as meter:
        ...
    meter.energy.joules

The counter is NVML's (nvidia-ml-py, where it is installed); where there is none the energy is null and the note says
why. Counter and samples are two ways to the same figure, so a reader can tell whether to trust it.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

INTERVAL_S = 0.5  # between two samples
LONGEST_GAP_S = 3.0  # between two samples, for their integral to mean anything


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Of one GPU in one span. Null: not known."""

    joules: float | None = None  # by the counter
    power_joules: float | None = None  # by the samples
    mean_power_w: float | None = None  # by the counter
    note: str | None = None  # why there is none


class EnergyMeter:
    """Reads the counter at both ends of a span, and samples the power in a thread in between."""

    def __init__(self, device: torch.device, nvml: Any = None, interval_s: float = INTERVAL_S):
        self.energy = Energy(note="the span has not ended")
        self._nvml, self._interval_s = nvml, interval_s
        self._gpu: Any = None
        self._began_mj = 0
        self._samples: list[tuple[float, float]] = []  # seconds, watts
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        try:
            self._gpu = self._find(device)
        except Exception as error:  # whatever a driver says, the measurement of speed goes on without this one
            self.energy = Energy(note=f"no energy counter: {error}")

    def _find(self, device: torch.device) -> Any:
        if device.type != "cuda":
            raise LookupError(f"the run is on a {device.type} device")
        if self._nvml is None:
            self._nvml = import_module("pynvml")
        self._nvml.nvmlInit()
        # By its own name: NVML knows nothing of CUDA_VISIBLE_DEVICES.
        gpu = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)  # a GPU may have no counter
        self._nvml.nvmlDeviceGetPowerUsage(gpu)
        return gpu

    def __enter__(self) -> "EnergyMeter":
        if self._gpu is not None:
            self._began_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)
            self._look()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._gpu is None:
            return
        self._done.set()
        self._thread.join()
        self._look()
        joules = (self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) - self._began_mj) / 1e3
        seconds = self._samples[-1][0] - self._samples[0][0]
        self.energy = Energy(joules=joules, power_joules=integral(self._samples), mean_power_w=joules / seconds)

    def _sample(self) -> None:
        while not self._done.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        self._samples.append((time.perf_counter(), self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3))


def integral(samples: Sequence[tuple[float, float]]) -> float | None:
    """Joules, of samples of (seconds, watts) joined by straight lines; None where they are too far apart."""
    gaps = [after[0] - before[0] for before, after in pairwise(samples)]
    if not gaps or max(gaps) > LONGEST_GAP_S:
        return None
    means = ((before[1] + after[1]) / 2 for before, after in pairwise(samples))
    return sum(gap * mean for gap, mean in zip(gaps, means, strict=True))
