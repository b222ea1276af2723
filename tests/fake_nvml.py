"""NVML of one GPU with the UUID GPU-1234: constant power, clocks that step down, a power cap."""

import time
from collections.abc import Callable


class FakeNvml:
    """Functions of `pynvml`, as far as we use it; functions named in `missing` raise as an old GPU does."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(
        self, watts: float = 200.0, missing: tuple[str, ...] = (), clock: Callable[[], float] = time.perf_counter
    ):
        self.watts, self.clock = watts, clock
        self.began = clock()
        self.reads = 0
        for name in missing:
            setattr(self, name, self._not_supported)

    def _not_supported(self, *_: object) -> int:
        raise RuntimeError("Not Supported")

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        assert name == "GPU-1234"
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        return int((self.clock() - self.began) * self.watts * 1e3)

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        self.reads += 1
        return int(self.watts * 1e3)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu: str, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return 1980 if self.reads < 2 else 1755

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: str) -> int:
        return 0x0 if self.reads < 2 else 0x4 | 0x40
