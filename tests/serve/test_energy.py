"""Energy counter and sampled power of a fake NVML driver."""

import time
from types import SimpleNamespace

import pytest
import torch

from llmb.serve.benchmark.energy import EnergyMeter, integrate_power

GPU = torch.device("cuda", 0)


class Driver:
    """NVML of one GPU that draws constant power."""

    def __init__(self, watts: float = 200.0):
        self.watts, self.began = watts, time.perf_counter()

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        assert name == "GPU-1234"
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        return int((time.perf_counter() - self.began) * self.watts * 1e3)

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return int(self.watts * 1e3)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))


def test_counter_and_sampled_power_agree_at_constant_power() -> None:
    with EnergyMeter(GPU, Driver(), interval_s=0.01) as meter:
        time.sleep(0.2)
    energy = meter.energy
    assert energy.note is None
    assert energy.joules == pytest.approx(energy.power_joules, rel=0.05)
    assert energy.mean_power_w == pytest.approx(200, rel=0.05)


def test_missing_counter_is_noted() -> None:
    class Old(Driver):
        def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
            raise RuntimeError("Not Supported")

    for device, driver, reason in (
        (GPU, Old(), "no energy counter: Not Supported"),
        (torch.device("cpu"), Driver(), "no energy counter: the run is on a cpu device"),
    ):
        with EnergyMeter(device, driver) as meter:
            pass
        assert meter.energy.note == reason
        assert meter.energy.joules is meter.energy.power_joules is meter.energy.mean_power_w is None


def test_integrate_power() -> None:
    assert integrate_power([(0.0, 100.0), (1.0, 300.0), (3.0, 300.0)]) == pytest.approx(800.0)
    assert integrate_power([(0.0, 100.0), (4.0, 100.0)]) is None  # too far apart
    assert integrate_power([(0.0, 100.0)]) is None
