"""Checkpoints: an interrupted run resumes as if it had not been interrupted."""

import json
import os
import random
import resource
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from sharded_network import ONE, shard
from small_models import SMALL_MODELS
from torch import nn

from llmb.config.model import RopeConfig
from llmb.config.serialization import build
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.formats.token_file import TokenWriter
from llmb.models.architectures import build_model
from llmb.results.derive import derive
from llmb.runtime.checkpoint_folder import IDENTITY, checkpoint_step, complete_checkpoints, latest_checkpoint
from llmb.runtime.checksums.checkpoint_checksums import find_damage
from llmb.train import loop
from llmb.train.__main__ import main
from llmb.train.checkpoint_identity import FORMAT
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.train_checkpoint import Checkpointer, state_tensors

# A fork server with torch already imported starts every process of these tests.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["llmb.train.loop", "torch._dynamo"])


def engine(config: Path) -> None:
    """One process, as `python -m llmb.train` runs it."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os._exit(main([str(config)]))


@pytest.mark.slow
def test_resume_in_same_folder_or_from_checkpoints_folder(trained) -> None:
    straight = trained(steps=6, tied_embeddings=True)
    first = trained(steps=4, tied_embeddings=True, checkpoint_every=3)
    resumed = trained(steps=6, tied_embeddings=True, checkpoint_every=1, resume=str(first.folder / "checkpoints"))
    assert resumed.losses() == straight.losses()[3:]
    assert [path.name for path in complete_checkpoints(resumed.folder / "checkpoints")] == [
        "step_5",
        "step_6",
    ]  # the newest two
    config = first.folder / "config.json"
    data = json.loads(config.read_text())
    data["workload"] |= {"steps": 6, "resume": str(first.folder)}
    (first.folder / "checkpoints" / "step_6.partial").mkdir()  # left by a killed run
    config.write_text(json.dumps(data))
    assert main([str(config)]) == 0
    assert first.losses()[-3:] == straight.losses()[3:]
    assert latest_checkpoint(first.folder).name == "step_6"


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "partial"), [(8, 1), pytest.param(32, 5, marks=pytest.mark.nightly)])
def test_resume_after_kills_at_random_times(folder_of, trained, kills: int, partial: int, campaign) -> None:
    """Each run is killed at a random time; the next resumes from the latest complete checkpoint."""
    moments = random.Random(7)
    losses: dict[int, float] = {}
    resume, last, cut_short, killed = None, 0, 0, 0
    while (
        killed < kills or last <= kills or cut_short < partial
    ):  # until there was progress and some partial checkpoints
        assert killed < 150
        killed += 1
        folder = folder_of(steps=10**6, checkpoint_every=1, resume=resume)
        process = PROCESSES.Process(target=engine, args=(folder / "config.json",))
        process.start()
        events = folder / "events.rank0.jsonl"
        while not events.exists():
            assert process.is_alive()
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.8))
        process.kill()
        process.join()
        for line in events.read_text().splitlines(keepends=True):
            event = json.loads(line)  # a kill tears no line
            if event["event"] == "StepDone":
                assert losses.setdefault(event["step"], event["loss"]) == event["loss"]
        checkpoints = folder / "checkpoints"
        cut_short += any(checkpoints.glob("*.partial"))
        if complete_checkpoints(checkpoints):
            assert checkpoint_step(latest_checkpoint(folder)) > last
            resume, last = str(folder), checkpoint_step(latest_checkpoint(folder))
    campaign("kills of training", killed)
    end = trained(steps=last + 5, resume=resume)
    losses |= {s.step: s.loss for s in end.steps()}
    straight = trained(steps=last + 5)
    assert [losses[step] for step in sorted(losses) if step <= last + 5] == straight.losses()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": 64}, "was made with model.hidden=32, this run has 64"),
        ({"architecture": "nemotron_h"}, "was made with model.architecture=llama, this run has nemotron_h"),
        ({"rope": RopeConfig(theta=1e4)}, "was made with model.rope.theta=500000.0, this run has 10000.0"),
        ({"dtype": "bf16"}, "was made with dtype=fp32, this run has bf16"),
        ({"steps": 2}, "step_2 is past the last step, 2; raise steps to continue"),
    ],
)
def test_incompatible_checkpoint_is_refused(trained, capsys, changes: dict, reason: str) -> None:
    first = trained(steps=2, checkpoint_every=2)
    capsys.readouterr()
    refusal = trained(**{"steps": 4, "resume": str(first.folder), **changes}).refusal()
    assert reason in refusal
    assert capsys.readouterr().err == f"llmb.train: {refusal}\n"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"moments": "bf16", "master_weights": "bf16"}, "master_weights=fp32, this run has bf16; moments=fp32"),
        ({"lr": 1e-5, "lr_decay_steps": 50}, "lr_decay_steps=None, this run has 50"),
        ({"seed": 5}, "seed=1234, this run has 5"),
    ],
)
def test_a_resume_that_trains_otherwise_needs_force_and_is_recorded(trained, capsys, changes: dict, named: str) -> None:
    first = trained(steps=2, dtype="bf16", checkpoint_every=2)
    changes = {"steps": 4, "dtype": "bf16", "resume": str(first.folder), **changes}
    refusal = trained(**changes).refusal()
    assert named in refusal
    assert refusal.endswith("; --force continues all the same")
    capsys.readouterr()
    forced = trained(force_resume=True, **changes)
    assert forced.ended().status == "ok"
    assert f"warning: resume: {latest_checkpoint(first.folder)} was made with" in capsys.readouterr().err
    (warning,) = [w for w in derive(None, forced.events()).warnings if w.code == "FORCED_RESUME"]
    assert named in warning.text


def test_a_text_run_does_not_go_on_with_other_tokens(trained, tmp_path) -> None:
    files = {}
    for name, token in (("a", 1), ("b", 2)):
        files[name] = str(tmp_path / f"{name}.tokens")
        with TokenWriter(Path(files[name]), vocab=64) as file:
            file.add([token] * 4000)
    first = trained(steps=2, checkpoint_every=2, data=files["a"])
    assert "was made with data={'vocab': 64" in trained(steps=4, resume=str(first.folder)).refusal()
    other = trained(steps=4, resume=str(first.folder), data=files["b"])  # of the same size
    assert "was made with data_fingerprint=" in other.refusal()
    moved = Path(files["a"]).rename(tmp_path / "moved.tokens")
    assert trained(steps=4, resume=str(first.folder), data=str(moved)).ended().status == "ok"


def is_refused(checkpoint: Path) -> bool:
    """Return whether a file of the checkpoint is found to be damaged; an unreadable identity is an error."""
    try:
        return find_damage(checkpoint) is not None
    except ConfigError:
        return True


def test_every_flipped_byte_of_a_checkpoint_is_found(trained) -> None:
    first = trained(steps=4, checkpoint_every=2)
    older, newest = complete_checkpoints(first.folder / "checkpoints")
    offsets = random.Random(3)
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for offset in offsets.sample(range(len(whole)), 3):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << offset % 8]) + whole[offset + 1 :])
            assert is_refused(newest), f"{path.name}, byte {offset}"
        path.write_bytes(whole)
    assert find_damage(newest) is None
    (shard,) = newest.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    refusal = trained(steps=6, resume=str(first.folder)).refusal()
    changed = f"{newest} is damaged: {shard.name} is not what was written: its checksum differs"
    assert refusal == f"resume: {changed}; resume={older} continues from an older one"
    assert trained(steps=6, resume=str(older)).ended().status == "ok"
    (older / IDENTITY).write_text("{")
    assert trained(steps=6, resume=str(first.folder)).refusal().endswith("; no older one is intact")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("gradients", None, None),  # not recorded: resumes without a warning
        ("format", None, "has format 1"),  # not recorded
        ("format", FORMAT + 1, f"has format {FORMAT + 1}"),
    ],
)
def test_identity_of_another_version(trained, capsys, field: str, value: int | None, reason: str | None) -> None:
    first = trained(steps=2, dtype="bf16", checkpoint_every=2)
    path = latest_checkpoint(first.folder) / IDENTITY
    saved = json.loads(path.read_text())
    assert saved.pop(field)
    del saved["crc32"]
    path.write_text(json.dumps(saved if value is None else saved | {field: value}))
    capsys.readouterr()
    done = trained(steps=4, dtype="bf16", gradients="bf16", resume=str(first.folder))
    if reason is not None:
        reason = f"resume: {path.parent} {reason}, this version of llmb reads format {FORMAT} only"
    assert (done.code, done.ended().reason) == (0 if reason is None else 1, reason)
    assert capsys.readouterr().err == ("" if reason is None else f"llmb.train: {reason}\n")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("extra", "the run has a tensor model.extra, the checkpoint has none"),
        ("norm.weight", "model.norm.weight is [32] torch.float32 in the checkpoint and [3] torch.float32 in this run"),
    ],
)
def test_mismatched_tensors_are_reported(trained, monkeypatch, name: str, reason: str) -> None:
    first = trained(steps=2, checkpoint_every=2)
    build = loop.build_model_parts

    def with_another_parameter(*arguments):
        (model,) = build(*arguments)
        sharded_parameters(model).replicated[0].parameters[name] = nn.Parameter(torch.zeros(3))
        return [model]

    monkeypatch.setattr(loop, "build_model_parts", with_another_parameter)
    assert reason in trained(steps=4, resume=str(first.folder)).ended().reason


def test_failed_resume_is_one_line(trained, tmp_path) -> None:
    assert trained(resume=str(tmp_path / "none")).ended().reason == f"resume: there is no folder {tmp_path / 'none'}"
    assert "holds no complete checkpoint" in trained(resume=str(tmp_path)).ended().reason
    first = trained(steps=2, checkpoint_every=2)
    for written in latest_checkpoint(first.folder).glob("*.distcp"):
        written.write_bytes(written.read_bytes()[:100])
    refusal = trained(steps=4, resume=str(first.folder)).refusal()
    assert "is damaged: __0_0_0.distcp has 100 bytes," in refusal
    assert "\n" not in refusal


def test_existing_checkpoints_are_not_overwritten(trained) -> None:
    first = trained(steps=2, checkpoint_every=2)
    assert main([str(first.folder / "config.json")]) == 1
    assert "step_2 already exists; resume=" in (first.folder / "events.rank0.jsonl").read_text()
    assert trained(steps=4, resume=str(first.folder)).ended().status == "ok"


def test_full_disk_fails_the_run_and_keeps_older_checkpoints(trained, tmp_path, monkeypatch, capsys) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    step = loop.train_step

    def disk_fills_up(*arguments):
        if arguments[-1] == 4:
            while not complete_checkpoints(tmp_path / "run 0" / "checkpoints"):
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        return step(*arguments)

    monkeypatch.setattr(loop, "train_step", disk_fills_up)
    try:
        done = trained(steps=100, checkpoint_every=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert done.code == 2
    assert done.ended().status == "failed"
    folder = done.folder / "checkpoints"
    assert done.ended().reason == f"cannot write checkpoint {folder / 'step_4'}: File too large"
    assert capsys.readouterr().err == f"llmb.train: {done.ended().reason}\n"
    assert [path.name for path in folder.iterdir()] == ["step_2"]
    assert trained(steps=4, resume=str(done.folder)).losses() == trained(steps=4).losses()[2:]


def test_checkpoint_write_is_asynchronous(trained, monkeypatch) -> None:
    """Writing is blocked until the last step; the staged tensors are what is written."""
    write, held = Checkpointer._write, []

    def held_up(self, step, tensors):
        while not held:
            time.sleep(0.01)
        write(self, step, tensors)

    take = loop.train_step

    def note_the_last(job, model, optimizer, step):
        if step == 4:
            held.append("released")
        return take(job, model, optimizer, step)

    monkeypatch.setattr(Checkpointer, "_write", held_up)
    monkeypatch.setattr(loop, "train_step", note_the_last)
    first = trained(steps=4, checkpoint_every=3)
    assert first.ended().status == "ok"
    monkeypatch.undo()
    assert trained(steps=4, resume=str(first.folder)).losses() == first.losses()[3:]


def test_first_step_after_resume_is_warmup(trained) -> None:
    first = trained(steps=2, checkpoint_every=2)
    resumed = trained(steps=5, resume=str(first.folder), window=(2, 5))
    config = build(RunConfig, json.loads((resumed.folder / "config.json").read_text()))
    result = derive(config, resumed.events())
    assert (result.status, result.steps_done, result.window) == ("ok", 5, (2, 5))
    assert result.step_time_s.samples == tuple(
        s.seconds for s in resumed.steps()[1:]
    )  # of 3, 4 and 5 the first is warmup
    assert result.loss_last == trained(steps=5).losses()[-1]


def test_state_tensors_are_complete() -> None:
    model = build_model(SMALL_MODELS["grok1"])
    model.register_buffer("usage", torch.ones(2))
    names = {name for name, _ in model.named_parameters()}
    sharded = shard(model)
    optimizer = Optimizer([sharded], ONE)
    model(torch.arange(8)[None], torch.arange(8)[None]).backward()
    sharded.end_step()
    optimizer.update(1e-3)
    expected = {"model.usage", *(f"model.{name}" for name in names)}
    expected |= {f"optimizer.{name}.{kind}" for name in names for kind in ("step", "exp_avg", "exp_avg_sq")}
    assert state_tensors([model], optimizer).keys() == expected
