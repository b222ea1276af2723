"""Energy counter and sampled power of a fake NVML driver."""

from pathlib import Path

import pytest
import torch
from fake_nvml import FakeNvml

from llmb.runtime.gpu_sampler import GpuSampler
from llmb.runtime.nvml_gpu import NvmlGpu
from llmb.runtime.recorder import EventRecorder
from llmb.serve.benchmark.energy import EnergyMeter, integrate_power

GPU = torch.device("cuda", 0)


def sampler(folder: Path, nvml: FakeNvml) -> GpuSampler:
    return GpuSampler(EventRecorder(folder, 0), GPU, measured=False, gpu=NvmlGpu(nvml, "GPU-1234"), interval_s=0.01)


class Clock:
    """A clock that only a test advances."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    time = perf_counter  # of the samples' events
    thread_time = perf_counter


def test_counter_and_sampled_power_agree_at_constant_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in ("llmb.runtime.gpu_sampler", "llmb.serve.benchmark.energy"):
        monkeypatch.setattr(f"{module}.time", clock)
    nvml = FakeNvml(clock=clock.perf_counter)
    with sampler(tmp_path, nvml) as samples, EnergyMeter(samples) as meter:
        clock.now = 2.0
    energy = meter.energy
    assert energy.note is None
    assert (energy.joules, energy.mean_power_w) == (400.0, 200.0)
    assert energy.power_joules == pytest.approx(400.0)


def test_missing_counter_is_noted(tmp_path: Path) -> None:
    old = sampler(tmp_path, FakeNvml(missing=("nvmlDeviceGetTotalEnergyConsumption",)))
    cpu = GpuSampler(EventRecorder(tmp_path, 1), torch.device("cpu"))
    for samples, reason in (
        (old, "no energy counter: the GPU has none"),
        (cpu, "no energy counter: the run is on a cpu device"),
    ):
        with samples, EnergyMeter(samples) as meter:
            pass
        assert meter.energy.note == reason
        assert meter.energy.joules is meter.energy.power_joules is meter.energy.mean_power_w is None


def test_integrate_power() -> None:
    assert integrate_power([(0.0, 100.0), (1.0, 300.0), (3.0, 300.0)]) == pytest.approx(800.0)
    assert integrate_power([(0.0, 100.0), (4.0, 100.0)]) is None  # too far apart
    assert integrate_power([(0.0, 100.0)]) is None
