"""Energy counter and sampled power of a fake NVML driver."""

import time
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


def test_counter_and_sampled_power_agree_at_constant_power(tmp_path: Path) -> None:
    with sampler(tmp_path, FakeNvml()) as samples, EnergyMeter(samples) as meter:
        time.sleep(0.2)
    energy = meter.energy
    assert energy.note is None
    assert energy.joules == pytest.approx(energy.power_joules, rel=0.05)
    assert energy.mean_power_w == pytest.approx(200, rel=0.05)


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
