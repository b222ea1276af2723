"""Checkpoints of parameter buckets: every bit survives, only complete folders count, a wrong resume is refused."""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_training import LEAST
from small_models import llama_model
from torch import Tensor

from llmb.config.model import RopeConfig
from llmb.config.spec import OutOfCore
from llmb.errors import ConfigError, LaunchError
from llmb.formats.token_file import TokenWriter
from llmb.offload.offload_checkpoint import checkpoint_identity, load, resume_point, save
from llmb.runtime.checkpoint_folder import checkpoint_step, complete_checkpoints, latest_checkpoint
from llmb.runtime.token_data import TokenFile

MODEL = llama_model(name="small", vocab=96)
PLAN = replace(
    LEAST, dtype="bf16", seqlen=32, gbs=4, chunk_tokens=16, groups_per_round=2, update_at="forward", levels="F" * 8
)
NUMBERS = 1024  # of a bucket here
WORK = OutOfCore(seqlen=32, host_gib=1.0, device_gib=1.0, steps=10, checkpoint_every=2, lr=1e-3, lr_warmup_steps=0)
FACTS = checkpoint_identity(MODEL, PLAN, WORK, None)


def bucket_tensors() -> dict[str, Tensor]:
    """Weights and state of a bucket as a run has them with split master weights: views into one buffer of bytes."""
    dtypes = {"param": torch.bfloat16, "low": torch.int16, "m": torch.float32, "v": torch.float32}
    buffer = torch.zeros(sum(dtype.itemsize for dtype in dtypes.values()) * NUMBERS, dtype=torch.uint8)
    tensors, first = {}, 0
    for name, dtype in dtypes.items():
        end = first + dtype.itemsize * NUMBERS
        tensors[name], first = buffer[first:end].view(dtype), end
    tensors["param"].normal_(generator=torch.Generator().manual_seed(0))
    return tensors


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (item.dtype, item.view(torch.uint8).numpy().tobytes()) for name, item in tensors.items()}


def test_every_bit_pattern_survives(tmp_path: Path) -> None:
    every = torch.arange(1 << 16).to(torch.int16)  # all bf16 numbers, and with them each NaN
    bucket = {"param": every.view(torch.bfloat16), "low": every.clone()}
    save(tmp_path, 1, [(0, bucket)], FACTS)
    assert bits(load(latest_checkpoint(tmp_path), 0)) == bits(bucket)


@pytest.mark.slow
def test_complete_checkpoint_survives_a_kill_at_any_moment(tmp_path: Path, campaign) -> None:
    campaign("kills of training", kills := 6)
    moments = random.Random(5)
    folder, step = tmp_path / "checkpoints", 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            for later in range(step + 1, step + 10_000):
                # So few that torch fills them in one thread: a process that was forked has no others, and would wait.
                bucket = {"param": torch.full((20_000,), float(later))}
                save(tmp_path, later, ((number_, bucket) for number_ in range(4)), FACTS)
            os._exit(0)
        while not folder.is_dir() or not any(checkpoint_step(path) > step for path in complete_checkpoints(folder)):
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in complete_checkpoints(folder):
            assert json.loads((path / "checkpoint.json").read_text())["step"] == checkpoint_step(path)
            assert all((load(path, bucket)["param"] == checkpoint_step(path)).all() for bucket in range(4))
        step = checkpoint_step(latest_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": replace(MODEL, hidden=64)}, "made with model.hidden=32, this run has 64"),
        (
            {"model": replace(MODEL, rope=RopeConfig(theta=1e4))},
            "made with model.rope.theta=500000.0, this run has 10000.0",
        ),
        ({"plan": replace(PLAN, dtype="fp32")}, "made with dtype=bf16, this run has fp32"),
        ({"plan": replace(PLAN, update="stochastic")}, "made with update=master, this run has stochastic"),
        ({"plan": replace(PLAN, gbs=5)}, "made with gbs=4, this run has 5"),
        ({"workload": replace(WORK, seed=1)}, "made with seed=1234, this run has 1"),
        ({"workload": replace(WORK, pack=True)}, "made with pack=False, this run has True"),
        ({"data": 300}, "made with data.tokens=200, this run has 300"),
        ({"workload": replace(WORK, steps=2)}, "step_2 is past the last step, 2; raise steps to continue"),
    ],
)
def test_incompatible_checkpoint_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    def data(tokens: int) -> TokenFile:
        with TokenWriter(tmp_path / f"tokens{tokens}", vocab=96) as file:
            file.add([1] * tokens)
        return TokenFile(tmp_path / f"tokens{tokens}")

    created: dict[str, Any] = {"model": MODEL, "plan": PLAN, "workload": WORK, "data": data(200)}
    save(tmp_path, 2, [(0, bucket_tensors())], checkpoint_identity(**created))
    now = created | changes | ({"data": data(changes["data"])} if "data" in changes else {})
    with pytest.raises(ConfigError) as error:
        resume_point(replace(now["workload"], resume=str(tmp_path)), tmp_path / "next", checkpoint_identity(**now))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_run_resumes_with_another_plan_and_learning_rate(tmp_path: Path) -> None:
    save(tmp_path, 2, [(0, bucket_tensors())], FACTS)
    second = replace(PLAN, chunk_tokens=32, groups_per_round=4, resident_params=3, levels="I" * 8, update_at="backward")
    work = replace(WORK, lr=1e-4, lr_warmup_steps=5, resume=str(tmp_path))
    identity = checkpoint_identity(MODEL, second, work, None)
    with pytest.raises(ConfigError, match=r"lr=0.001, this run has 0.0001; lr_warmup_steps=0, this run has 5; --force"):
        resume_point(work, tmp_path, identity)
    point = resume_point(replace(work, force_resume=True), tmp_path, identity)
    assert point is not None
    assert (point.path, len(point.differences)) == (latest_checkpoint(tmp_path), 2)
    with pytest.raises(ConfigError, match=r"step_2 already exists; resume=.* continues from it"):
        resume_point(WORK, tmp_path, FACTS)
    assert resume_point(WORK, tmp_path / "new", FACTS) is None


def test_full_disk_is_one_line_and_spares_older_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 2, enumerate([bucket_tensors()]), FACTS)

    def buckets() -> Iterator[tuple[int, dict[str, Tensor]]]:
        yield 0, {"param": torch.zeros(5_000_000)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        yield 1, {"param": torch.zeros(5_000_000)}

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(LaunchError) as error:
            save(tmp_path, 4, buckets(), FACTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder = tmp_path / "checkpoints"
    assert str(error.value) == f"cannot write checkpoint {folder / 'step_4'}: File too large after 0.02 GB of it"
    assert [path.name for path in folder.iterdir()] == ["step_2"]
    assert bits(load(latest_checkpoint(tmp_path), 0)) == bits(bucket_tensors())


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(LaunchError, match=r"cannot write checkpoint .*step_4: (Not a directory|File exists) after 0"):
        save(tmp_path, 4, [(0, bucket_tensors())], FACTS)


def test_damaged_or_missing_bucket_is_named(tmp_path: Path) -> None:
    save(tmp_path, 2, [(0, bucket_tensors())], FACTS)
    path = latest_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"resume: cannot read checkpoint .*unit_0001.safetensors: No such file"):
        load(path, 1)
    file = path / "unit_0000.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"resume: cannot read checkpoint .*unit_0000.safetensors: ") as error:
        load(path, 0)
    assert "\n" not in str(error.value)
