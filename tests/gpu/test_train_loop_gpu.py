"""Training on a GPU: layers of full width learn, recompute saves memory, fp8 follows bf16; out of memory, waits."""

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU
from recipe_models import recipe_model
from small_models import llama_model
from training_run import run_config, train, train_to_the_end

from llmb.config.model import Model
from llmb.config.spec import Training
from llmb.train.loop import TrainJob, build_training, train_step
from llmb.train.parallel.mesh import Mesh

pytestmark = NEEDS_GPU

LLAMA = recipe_model("pretrain_llama3.1", "8b", layers=2)
NEMOTRON_H = recipe_model("pretrain_nemotronh", "8b", layers=4, pattern="M-M*")
GROK = recipe_model("pretrain_grok1", "314b", layers=1, vocab=32064, experts={"count": 4})
DEEPSEEK = recipe_model("pretrain_deepseek-v3", "671b", layers=2, vocab=32064, experts={"count": 32, "dense_layers": 1})
WORK = Training(seqlen=8192, mbs=1, gbs=2, ga=2, steps=4, window=(3, 4), lr=3e-5)


def loss_of_chance(model: Model) -> float:
    """Initial logits are random with variance hidden * 0.02^2, which adds half of that to the logarithm."""
    return math.log(model.vocab) + model.hidden * 0.02**2 / 2


@pytest.mark.parametrize(
    ("model", "work"),
    [(LLAMA, replace(WORK, mbs=2, ga=1)), (NEMOTRON_H, replace(WORK, lr=3e-4))],
    ids=["llama", "nemotron_h"],
)
def test_recompute_saves_memory_and_keeps_the_loss(tmp_path: Path, model: Model, work: Training) -> None:
    peaks, losses = [], []
    for layers in (0, model.layers):
        config = run_config(model, "bf16", replace(work, recompute_layers=layers))
        steps = train_to_the_end(config, tmp_path / str(layers))
        peaks.append(steps[-1].memory_bytes)
        losses.append([step.loss for step in steps])
    assert losses[0][0] == pytest.approx(loss_of_chance(model), rel=0.01)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] < peaks[0] - 2**30


@pytest.mark.exclusive  # about 35 GiB
@pytest.mark.parametrize(
    ("model", "dtype", "recompute_layers"),
    [
        (GROK, "bf16", 1),
        (DEEPSEEK, "fp8", 0),
        pytest.param(GROK, "bf16", 0, marks=pytest.mark.nightly),
        pytest.param(GROK, "fp8", 0, marks=pytest.mark.nightly),
        pytest.param(DEEPSEEK, "bf16", 0, marks=pytest.mark.nightly),
        pytest.param(DEEPSEEK, "bf16", 1, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value.architecture if isinstance(value, Model) else str(value),
)
def test_moe_layers_of_full_width_train(tmp_path: Path, model: Model, dtype: str, recompute_layers: int) -> None:
    if dtype == "fp8" and torch.cuda.get_device_capability(GPU) != (9, 0):
        pytest.skip("torch's grouped fp8 GEMM needs Hopper")
    # With few tokens per step, DeepSeek's width is unstable at 3e-4.
    work = Training(seqlen=4096, mbs=1, gbs=1, ga=1, steps=8, window=(5, 8), lr=3e-5, recompute_layers=recompute_layers)
    losses = [step.loss for step in train_to_the_end(run_config(model, dtype, work), tmp_path)]
    assert losses[-1] < losses[0]


def test_a_small_llama_trains_in_fp8_as_in_bf16(tmp_path: Path) -> None:
    model = llama_model(layers=4, hidden=256, ffn=768, vocab=1024)
    work = Training(seqlen=512, mbs=4, gbs=8, ga=2, steps=50, window=(30, 50), lr=1e-3)
    losses = {
        dtype: [step.loss for step in train_to_the_end(run_config(model, dtype, work), tmp_path / dtype)]
        for dtype in ("bf16", "fp8")
    }
    assert losses["fp8"][0] == pytest.approx(losses["bf16"][0], rel=2e-3)
    last = {dtype: sum(values[-10:]) / 10 for dtype, values in losses.items()}
    assert last["bf16"] < losses["bf16"][0] - 0.3, "there is something to learn"
    assert last["fp8"] == pytest.approx(last["bf16"], rel=0.01)


@pytest.mark.exclusive  # fills the memory
def test_out_of_memory_names_a_smaller_batch(tmp_path: Path) -> None:
    steps, ended = train(run_config(LLAMA, "bf16", replace(WORK, mbs=256, gbs=256, ga=1)), tmp_path)
    assert not steps
    assert ended.status == "oom"
    assert re.search(r"GiB of \d+\.\d GiB: lower mbs from 256 to \d+ \(frees about \d+\.\d GiB\)", ended.reason)


def test_step_synchronizes_once() -> None:
    work = replace(WORK, seqlen=256)
    config = run_config(llama_model(hidden=256, ffn=512, vocab=1000), "bf16", work)
    job, parts, optimizer = build_training(TrainJob(config, work, Mesh(0, 1, GPU)))
    train_step(job, parts, optimizer, 1)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(job, parts, optimizer, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchronizing" in str(w.message)]
    assert len(waits) == 1, waits
