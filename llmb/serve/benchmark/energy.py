"""Energy of this rank's GPU during a block: from the driver's counter, and from sampled power as a cross-check.

    with EnergyMeter(device) as meter:
        ...
    meter.energy.joules

The counter is NVML's (nvidia-ml-py, if installed); without it the energy is null and the note says why. Counter and
samples measure the same quantity, so a reader can tell whether to trust it.
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
MAX_GAP_S = 3.0  # between two samples that may be integrated


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of one GPU in one block. None: unknown."""

    joules: float | None = None  # from the counter
    power_joules: float | None = None  # from the samples
    mean_power_w: float | None = None  # from the counter
    note: str | None = None  # why it is unknown


class EnergyMeter:
    """Context manager that reads the counter at both ends and samples the power in a thread in between."""

    def __init__(self, device: torch.device, nvml: Any = None, interval_s: float = INTERVAL_S):
        self.energy = Energy(note="the block has not ended")
        self._nvml, self._interval_s = nvml, interval_s
        self._gpu: Any = None
        self._start_mj = 0
        self._samples: list[tuple[float, float]] = []  # seconds, watts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        try:
            self._gpu = self._open_gpu(device)
        except Exception as error:  # the benchmark runs without energy, whatever the driver raises
            self.energy = Energy(note=f"no energy counter: {error}")

    def _open_gpu(self, device: torch.device) -> Any:
        if device.type != "cuda":
            raise LookupError(f"the run is on a {device.type} device")
        if self._nvml is None:
            self._nvml = import_module("pynvml")
        self._nvml.nvmlInit()
        # By UUID, as NVML ignores CUDA_VISIBLE_DEVICES.
        gpu = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)  # raises if the GPU has no counter
        self._nvml.nvmlDeviceGetPowerUsage(gpu)
        return gpu

    def __enter__(self) -> "EnergyMeter":
        if self._gpu is not None:
            self._start_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)
            self._read_power()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._gpu is None:
            return
        self._stop.set()
        self._thread.join()
        self._read_power()
        joules = (self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) - self._start_mj) / 1e3
        seconds = self._samples[-1][0] - self._samples[0][0]
        self.energy = Energy(joules=joules, power_joules=integrate_power(self._samples), mean_power_w=joules / seconds)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._read_power()

    def _read_power(self) -> None:
        self._samples.append((time.perf_counter(), self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3))


def integrate_power(samples: Sequence[tuple[float, float]]) -> float | None:
    """Return the joules of (seconds, watts) samples by the trapezoidal rule; None if they are too far apart."""
    gaps = [after[0] - before[0] for before, after in pairwise(samples)]
    if not gaps or max(gaps) > MAX_GAP_S:
        return None
    means = ((before[1] + after[1]) / 2 for before, after in pairwise(samples))
    return sum(gap * mean for gap, mean in zip(gaps, means, strict=True))
