"""Whole runs of `python -m llmb.offload` in this process: events, profile, checkpoints, and how they end."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nvml import FakeNvml
from reference_training import LEAST, TIED, UNTIED, older_version
from small_models import qwen3_moe_model

from llmb.config.model import Model
from llmb.config.native.outofcore_support import supported_outofcore
from llmb.config.serialization import to_plain
from llmb.config.spec import Machine, OutOfCore, Parallel, Precision, Profile, RunConfig
from llmb.errors import ConfigError
from llmb.events import GpuSample, RunEnded, RunStarted, StepDone, read
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights
from llmb.offload.__main__ import run
from llmb.perfmodel.offload.stream_timeline import read_timeline
from llmb.report.timeline.svg_picture import picture
from llmb.report.timeline.tracks import Timeline
from llmb.report.timeline.views import views
from llmb.runtime.adamw_settings import learning_rate
from llmb.runtime.nvml_gpu import NvmlGpu
from llmb.runtime.recorder import EventRecorder

PLAN = replace(LEAST, update_at="forward", gbs=3, groups_per_round=2, chunk_tokens=6, levels="FAIFAIFAIFAI")
WORK = OutOfCore(
    seqlen=10, host_gib=0.1, device_gib=0.1, update="master", clip=1.0, gbs=3, steps=4, window=(3, 4), lr=1e-2,
    lr_warmup_steps=2, lr_decay_steps=8, plan=PLAN,
)  # fmt: skip
CONFIG = RunConfig(
    name="small",
    target="outofcore_llama3",
    size="8b",
    machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1),
    model=UNTIED,
    parallel=Parallel(),
    precision=Precision(dtype="fp32"),
    workload=WORK,
)


def with_work(**changes: Any) -> RunConfig:
    return replace(CONFIG, workload=replace(WORK, **changes))


def run_in(folder: Path, config: RunConfig) -> tuple[list[Any], int]:
    """Events and exit code."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    code = run(folder / "config.json", EventRecorder(folder, 0))
    return list(read(folder / "events.rank0.jsonl")), code


def losses(events: list[Any]) -> list[float | None]:
    return [event.loss for event in events if isinstance(event, StepDone)]


def test_run_records_every_step_and_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events, code = run_in(tmp_path, CONFIG)
    assert code == 0
    assert isinstance(events[0], RunStarted)
    assert events[-1].status == "ok"
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == [1, 2, 3, 4]
    assert [event.warmup for event in steps] == [True, True, False, False]
    assert all(event.tokens == 30 and event.seconds > 0 and event.memory_bytes > 0 for event in steps)
    assert all(math.isfinite(event.loss) and event.grad_norm > 0 for event in steps)
    out = capsys.readouterr().out
    assert f"learning rate: {learning_rate(2, WORK):.6E}" in out
    assert "memory: host 0.00 of 0.1 GiB" in out


def test_state_of_the_gpu_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmb.runtime.gpu_sampler.open_gpu", lambda device: NvmlGpu(FakeNvml(), "GPU-1234"))
    events, _ = run_in(tmp_path, CONFIG)
    assert any(isinstance(event, GpuSample) and event.power_w == 200.0 for event in events)


def test_profiled_run_writes_its_timeline(tmp_path: Path) -> None:
    window = Profile(profile=True, profile_start=2, profile_stop=4)
    _, code = run_in(tmp_path, replace(CONFIG, profile=window))
    assert code == 0
    streams = read_timeline(tmp_path / "profile" / "lanes.json")
    assert streams.source == "measured"
    assert {event.step for event in streams.events} == {2, 3}
    names = {event.name for event in streams.events if event.stream == "compute"}
    assert names == {"update", "embedding", "forward", "head", "backward", "embedding_backward"}
    assert {"param", "grad", "state", "inp", "rest"} <= {s.name for s in streams.events if s.stream == "outbound"}
    assert all(event.bytes > 0 for event in streams.events if event.stream != "compute")
    assert all(event.flops > 0 for event in streams.events if event.name in ("forward", "backward", "head"))


def test_run_with_a_disk_says_so_and_its_timeline_has_two_more_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run_in(tmp_path / "memory", CONFIG)
    plan = replace(PLAN, disk_states=4, disk_params=2)
    work = with_work(plan=plan, disk_gib=0.1, disk_path=str(tmp_path))
    monkeypatch.setattr("llmb.offload.offload_loop.buffered_line", lambda folder: f"{folder} is slow")
    window = Profile(profile=True, profile_start=3, profile_stop=4)
    events, code = run_in(tmp_path / "disk", replace(work, profile=window))
    assert code == 0
    assert losses(events) == losses(expected)
    assert events[0].fallbacks[-1] == f"{tmp_path} is slow"
    assert f"disk 0.00 of 0.1 GiB in {tmp_path}, " in capsys.readouterr().out
    timeline = read_timeline(tmp_path / "disk" / "profile" / "lanes.json")
    for stream in ("disk_read", "disk_write"):
        transfers = [event for event in timeline.events if event.stream == stream]
        assert {event.name for event in transfers} == {"param", "state"}
        assert all(event.bytes > 0 and event.end > event.start > -0.01 for event in transfers)
    page = "".join(picture(Timeline.of(timeline), view).svg for view in views(Timeline.of(timeline)))
    assert "Disk reads" in page
    assert "GB/s to disk" in page


MIXTURE = qwen3_moe_model(name="mixture")
ROOMY = {"resident_params": 3, "resident_states": 7, "state_blocks": 0, "inp_slots": 9}


@pytest.mark.parametrize(
    ("model", "dtype", "update_at", "roomy"),
    [
        pytest.param(UNTIED, "bf16", "backward", ROOMY, marks=pytest.mark.slow),
        pytest.param(UNTIED, "fp8", "forward", ROOMY, marks=pytest.mark.slow),
        pytest.param(UNTIED, "bf16", "forward", ROOMY, marks=pytest.mark.nightly),
        (MIXTURE, "fp32", "forward", {"resident_params": 2, "resident_states": 3, "levels": "AAII" * 2}),
    ],
)
def test_resumed_run_continues_exactly_with_another_plan(
    tmp_path: Path, model: Model, dtype: Any, update_at: str, roomy: dict[str, Any]
) -> None:
    clip = 1.0 if update_at == "forward" else None
    plan = replace(PLAN, dtype=dtype, update="stochastic", update_at=update_at)
    if model is MIXTURE:
        plan = replace(plan, levels="AIAI" * 2, param_blocks=1, grad_blocks=1)
    work = replace(WORK, plan=plan, update="stochastic", clip=clip, checkpoint_every=2)
    config = replace(CONFIG, model=model, precision=Precision(dtype=dtype), workload=work)
    whole, _ = run_in(tmp_path / "whole", config)
    first, _ = run_in(tmp_path / "first", replace(config, workload=replace(work, steps=2)))
    other = replace(plan, **roomy)
    resumed = replace(work, resume=str(tmp_path / "first"), plan=other, export=str(tmp_path / "weights"))
    second, code = run_in(tmp_path / "second", replace(config, workload=resumed))
    assert code == 0
    assert losses(first) + losses(second) == losses(whole)
    network = build_model(model).to(torch.bfloat16)
    load_weights(network, tmp_path / "weights")
    assert all(parameter.isfinite().all() for parameter in network.parameters())


@pytest.mark.slow
def test_a_checkpoint_without_scales_is_named_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = with_work(plan=replace(PLAN, dtype="fp8"), checkpoint_every=2)
    config = replace(work, precision=Precision(dtype="fp8"))
    whole, _ = run_in(tmp_path / "whole", config)
    run_in(tmp_path, replace(config, workload=replace(config.workload, steps=2)))
    created = tmp_path / "checkpoints" / "step_2"
    older_version(created)
    capsys.readouterr()
    resumed = replace(config, workload=replace(config.workload, resume=str(tmp_path)))
    second, code = run_in(tmp_path / "second", resumed)
    assert code == 0
    assert losses(second) != losses(whole)[2:]
    assert losses(second) == pytest.approx(losses(whole)[2:], rel=0.02)  # measured anew: not the same bits, but close
    assert f"scales: none in {created}, measured anew\n" in capsys.readouterr().out


def test_a_plan_for_another_fp8_recipe_is_refused() -> None:
    work = with_work(plan=replace(PLAN, dtype="fp8", fp8_recipe="rowwise"))
    supported_outofcore(replace(work, precision=Precision(dtype="fp8", fp8_recipe="rowwise")))
    with pytest.raises(ConfigError, match="fp8_recipe=tensorwise_delayed, but its plan is for rowwise"):
        supported_outofcore(replace(work, precision=Precision(dtype="fp8")))


@pytest.mark.slow
def test_resumed_run_with_many_scales_continues_with_the_same_bits(tmp_path: Path) -> None:
    """There are no scales to save."""
    work = with_work(plan=replace(PLAN, dtype="fp8", fp8_recipe="rowwise"), checkpoint_every=2)
    config = replace(work, precision=Precision(dtype="fp8", fp8_recipe="rowwise"))
    whole, _ = run_in(tmp_path / "whole", config)
    run_in(tmp_path, replace(config, workload=replace(config.workload, steps=2)))
    resumed = replace(config, workload=replace(config.workload, resume=str(tmp_path)))
    second, code = run_in(tmp_path / "second", resumed)
    assert code == 0
    assert losses(second) == losses(whole)[2:]


def test_diverged_run_names_the_step(tmp_path: Path) -> None:
    events, code = run_in(tmp_path, with_work(lr=1e30, lr_warmup_steps=0, lr_decay_steps=None, clip=None))
    assert code == 2
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status == "diverged"
    assert "at step" in events[-1].reason
    assert losses(events)[-1] is None or events[-2].grad_norm is None


REFUSED = {
    "2 ranks": replace(CONFIG, parallel=Parallel(dp=2)),
    "workload.plan is null": with_work(plan=None),
    "is for 10": with_work(seqlen=11),
    "clip=1.0 needs a plan that updates in the next forward pass": with_work(plan=replace(PLAN, update_at="backward")),
    "but its plan is for fp32": replace(CONFIG, precision=Precision(dtype="bf16")),
    "does not compute gated=False of tied": replace(CONFIG, model=replace(TIED, gated=False)),
    "level F in workload.plan.levels of tied": replace(CONFIG, model=replace(TIED, pre_norms=False, post_norms=True)),
    "more than host_gib=0.0001": with_work(host_gib=1e-4),
    "more than disk_gib=0": with_work(plan=replace(PLAN, disk_states=1), disk_path="."),
    "name a folder there": with_work(plan=replace(PLAN, disk_states=1), disk_gib=1.0),
    "more than device_gib=0.0001": with_work(device_gib=1e-4),
    "has 3 letters, not 3 layers * 4 chunks": with_work(plan=replace(PLAN, levels="FAI")),
    "fewer than one computation needs": with_work(plan=replace(PLAN, param_blocks=1)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_configuration_is_refused_in_one_line(
    tmp_path: Path, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    events, code = run_in(tmp_path, REFUSED[message])
    assert code == 1
    assert events[-1].status == "failed"
    assert message in events[-1].reason
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
