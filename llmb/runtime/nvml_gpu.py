"""State of one GPU as the driver reports it: power, SM clock, temperature, throttle reasons, energy.

    gpu = open_gpu(torch.device("cuda", 0))       # raises LookupError on a CPU, or without a driver or nvidia-ml-py
    gpu.state() -> GpuState(power_w=688.4, sm_clock_mhz=1755, temperature_c=61, throttle_reasons=("power cap",))

What a GPU does not report is None. On Hopper and later the driver's power is an average over the last second.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

# Bits of nvmlClocksEventReasons, in the words of nvidia-smi.
THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One reading. None: the driver does not say."""

    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()


class GpuReader(Protocol):
    """GPU whose state can be read."""

    def state(self) -> GpuState: ...

    def energy_joules(self) -> float | None:
        """Return the energy since the driver was loaded; None: it has no counter."""


class NvmlGpu:
    """GPU of NVML; `nvml`: the module pynvml."""

    def __init__(self, nvml: Any, uuid: str):
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def state(self) -> GpuState:
        nvml, gpu = self._nvml, self._handle
        power_mw = _reading(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        limit_mw = _reading(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
        reasons = _reading(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)) or 0
        return GpuState(
            power_w=None if power_mw is None else power_mw / 1e3,
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            sm_clock_mhz=_reading(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            temperature_c=_reading(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS.items() if int(reasons) & bit),
        )

    def energy_joules(self) -> float | None:
        millijoules = _reading(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None if millijoules is None else millijoules / 1e3


def open_gpu(device: torch.device, nvml: Any = None) -> NvmlGpu:
    """Return the GPU of a device; raises LookupError with the reason if its state cannot be read."""
    if device.type != "cuda":
        raise LookupError(f"the run is on a {device.type} device")
    try:
        # By UUID, as NVML ignores CUDA_VISIBLE_DEVICES.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return NvmlGpu(nvml or import_module("pynvml"), uuid)
    except Exception as error:  # a run goes on without, whatever the driver raises
        raise LookupError(str(error)) from error


def _reading(call: Callable[[], float]) -> float | None:
    """Return a figure; None if this GPU does not have it, or is lost."""
    try:
        return call()
    except Exception:  # NVMLError of another version of the module
        return None
