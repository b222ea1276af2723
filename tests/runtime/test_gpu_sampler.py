"""Samples of a fake NVML driver become events; without a GPU there are none."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_nvml import FakeNvml

from llmb.events import GpuSample, read
from llmb.runtime.gpu_sampler import GpuSampler
from llmb.runtime.nvml_gpu import GpuState, NvmlGpu, open_gpu
from llmb.runtime.recorder import EventRecorder

GPU = torch.device("cuda", 0)


def test_samples_carry_state_and_their_own_cost(tmp_path: Path) -> None:
    gpu = NvmlGpu(FakeNvml(watts=650), "GPU-1234")
    with GpuSampler(EventRecorder(tmp_path, 3), GPU, gpu=gpu, interval_s=0.005) as sampler:
        while len(sampler.powers) < 3:
            time.sleep(0.005)
    samples = list(read(tmp_path / "events.rank3.jsonl"))
    assert all(isinstance(sample, GpuSample) for sample in samples)
    first, second = samples[:2]
    assert (first.rank, first.measured, first.power_w, first.power_limit_w) == (3, None, 650.0, 700.0)
    assert (first.sm_clock_mhz, first.temperature_c, first.throttle_reasons) == (1980, 61, ())
    assert (second.sm_clock_mhz, second.throttle_reasons) == (1755, ("power cap", "hardware thermal slowdown"))
    assert first.read_s is None
    assert second.read_s > 0
    count = len(samples)
    time.sleep(0.02)
    assert len(list(read(tmp_path / "events.rank3.jsonl"))) == count  # none after the block


def test_a_sample_says_whether_it_is_measured(tmp_path: Path) -> None:
    gpu = NvmlGpu(FakeNvml(), "GPU-1234")
    sampler = GpuSampler(EventRecorder(tmp_path, 0), GPU, measured=False, gpu=gpu)
    sampler.sample()
    sampler.measured = True
    sampler.sample()
    assert [sample.measured for sample in read(tmp_path / "events.rank0.jsonl")] == [False, True]


def test_what_a_gpu_does_not_report_is_unknown() -> None:
    silent = tuple(name for name in dir(FakeNvml) if name.startswith("nvmlDeviceGet") and "Handle" not in name)
    gpu = NvmlGpu(FakeNvml(missing=silent), "GPU-1234")
    assert gpu.state() == GpuState()
    assert gpu.energy_joules() is None


def test_without_a_gpu_nothing_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GpuSampler(EventRecorder(tmp_path, 0), torch.device("cpu")) as sampler:
        sampler.sample()
    assert sampler.note == "the run is on a cpu device"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    assert open_gpu(GPU, FakeNvml()).state().power_w == 200.0
    with pytest.raises(LookupError, match="Not Supported"):
        open_gpu(GPU, FakeNvml(missing=("nvmlInit",)))
