"""The real driver: plausible figures, and sampling that takes less than one percent of a core."""

from pathlib import Path

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU
from recipe_models import recipe_model
from training_run import run_config, train_to_the_end

from llmb.config.spec import Training
from llmb.events import read
from llmb.results.derive import derive
from llmb.runtime.nvml_gpu import open_gpu

pytestmark = NEEDS_GPU


def test_state_of_the_gpu_under_load() -> None:
    pytest.importorskip("pynvml")
    gpu = open_gpu(GPU)
    a = torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16)
    for _ in range(50):
        a = (a @ a).clamp(-1, 1)
    state = gpu.state()
    torch.cuda.synchronize()
    assert 20 < state.power_w < 2000
    assert 100 < state.sm_clock_mhz < 4000
    assert 10 < state.temperature_c < 110
    assert 20 < state.power_limit_w < 2000


def test_a_training_run_records_power_and_clocks(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    model = recipe_model("pretrain_llama3.1", "8b", layers=2)
    work = Training(seqlen=8192, mbs=1, gbs=2, ga=2, steps=24, window=(5, 24), lr=3e-5)
    config = run_config(model, "bf16", work)
    train_to_the_end(config, tmp_path)
    result = derive(config, read(tmp_path / "events.rank0.jsonl"))
    telemetry = result.telemetry
    assert telemetry is not None
    assert telemetry.samples >= 2
    assert result.mean_power_w == telemetry.power_w["mean"] > 20
    assert telemetry.sm_clock_mhz["p50"] > 100
    assert 0 <= telemetry.throttled_fraction <= 1
    assert telemetry.sampling_cpu_fraction < 0.01
