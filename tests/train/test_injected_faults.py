"""Injected faults: the run restarts after each, and its losses are those of the undisturbed run, bit for bit."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from config_changes import changed
from forked_starts import start_ranks
from small_config import CONFIG
from small_models import SMALL_MODELS, llama_model

from llmb.config.faults.fault_file import draw_faults, with_faults
from llmb.config.faults.fault_plan import FAULT_KINDS, Fault, FaultInjection
from llmb.config.spec import Limits, Parallel, RunConfig
from llmb.events import Event, RunLaunched, StepDone, read_all
from llmb.launch import hang_detector
from llmb.launch.restarts.restart_loop import run_with_restarts
from llmb.launch.run_folder import RunFolder
from llmb.results.derive import derive
from llmb.results.goodput.run_starts import run_starts
from llmb.results.result import Result
from llmb.runtime.faults import fault_injector
from llmb.runtime.recorder import EventRecorder
from llmb.train import train_checkpoint

TEN_FAULTS = (
    Fault(kind="rank_killed", step=2, rank=1),  # before the first checkpoint
    Fault(kind="slow_rank", step=4, rank=1, slow_s=0.05, slow_steps=2),
    Fault(kind="checkpoint_interrupted", step=6, rank=0),
    Fault(kind="rank_killed", step=8, rank=0),
    Fault(kind="hang", step=9, rank=1),
    Fault(kind="disk_full", step=12, rank=1),
    Fault(kind="node_lost", step=13, rank=0),
    Fault(kind="checkpoint_interrupted", step=15, rank=1),
    Fault(kind="disk_full", step=18, rank=0),
    Fault(kind="node_lost", step=20, rank=1, node_ranks=1),
)


def small_run(steps: int, **changes) -> RunConfig:
    config = changed(
        CONFIG, steps=steps, window=(2, steps), gpus=2, gpus_per_node=2, mbs=1, gbs=2, seqlen=16, checkpoint_every=3,
        parallel=Parallel(dp=2), **changes,
    )  # fmt: skip
    return replace(config, limits=Limits(stall_limit_s=5.0))


def run(config: RunConfig, install: Path) -> tuple[RunFolder, Result, list[Event]]:
    folder, outcome = run_with_restarts(config, RunFolder.create(install, config, datetime.now()), start_ranks)
    recorded = [event for start in folder.starts for event in read_all(start.all_events())]
    assert outcome.status == "ok", (outcome, folder.log.read_text())
    return folder, derive(config, recorded), recorded


def losses(recorded: list[Event]) -> dict[int, set]:
    """All losses and gradient norms of each step, on any rank and in any start."""
    by_step: dict[int, set] = {}
    for event in recorded:
        if isinstance(event, StepDone):
            by_step.setdefault(event.step, set()).add((event.loss, event.grad_norm))
    return by_step


def check(config: RunConfig, tmp_path: Path, plan: FaultInjection) -> Result:
    """Run with and without faults; compare losses, and check that each fault was injected once and counted."""
    _, _, undisturbed = run(config, tmp_path / "undisturbed")
    faulty = with_faults(config, plan)
    _, result, recorded = run(faulty, tmp_path / "faulty")
    assert losses(recorded) == losses(undisturbed)
    goodput = result.goodput
    assert goodput is not None
    assert {kind: cost.faults for kind, cost in goodput.by_kind.items()} == Counter(f.kind for f in plan.faults)
    assert [(f.kind, f.step, f.rank) for f in goodput.faults] == [(f.kind, f.step, f.rank) for f in plan.faults]
    assert goodput.restarts == sum(fault.ends_run for fault in plan.faults)
    assert goodput.repeated_steps > 0
    assert goodput.repeated_losses_differ == 0
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall_s)
    return result


def test_every_rank_of_a_lost_node_records_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may be slow, and is ended with rank 1 before it gets there: the fault must not strike once more."""

    def die() -> None:
        raise SystemExit

    monkeypatch.setattr(fault_injector, "_kill_this_process", die)
    plan = FaultInjection(faults=(Fault(kind="node_lost", step=3, rank=0),), source="one.yaml")
    recorders = [EventRecorder(tmp_path, rank) for rank in (1, 0)]
    for recorder in recorders:
        with pytest.raises(SystemExit):
            fault_injector.FaultInjector(with_faults(small_run(steps=5), plan), recorder).before_step(3)
    recorded = [event for recorder in reversed(recorders) for event in read_all([recorder.path])]
    (start,) = run_starts([RunLaunched(time=0.0, start=0, step=0), *recorded])
    assert [(fault.fault, fault.rank, fault.time) for fault in start.faults] == [(0, 0, recorded[1].time)]


def test_disk_that_is_full_on_one_rank_is_the_reason_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 still reads its own file when rank 0 has failed: the folder must be there as long as that."""
    checksums = train_checkpoint.checksums

    def slow_checksums(paths: Iterable[Path]) -> dict:
        time.sleep(0.3)
        return checksums(paths)

    monkeypatch.setattr(train_checkpoint, "checksums", slow_checksums)
    plan = FaultInjection(faults=(Fault(kind="disk_full", step=3, rank=0),), source="one.yaml")
    _, result, _ = run(with_faults(small_run(steps=4), plan), tmp_path)
    (fault,) = result.goodput.faults
    assert fault.reason.startswith("rank 0: cannot write checkpoint ")
    assert fault.reason.endswith("No space left on device")


@pytest.mark.slow
def test_losses_after_ten_faults_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    config = small_run(steps=21, model=llama_model(hidden=16, ffn=32, heads=2, kv_heads=1, vocab=64))
    result = check(config, tmp_path, FaultInjection(faults=TEN_FAULTS, source="ten.yaml"))
    reasons = {fault.kind: fault.reason for fault in result.goodput.faults}
    lost = {(fault.kind, fault.step): fault.steps_lost for fault in result.goodput.faults}
    assert "hung: no rank made progress" in reasons["hang"]
    assert "No space left on device" in reasons["disk_full"]
    assert lost["rank_killed", 2] == 1
    assert lost["checkpoint_interrupted", 6] == lost["disk_full", 12] == 3
    assert result.status == "ok"
    assert "FAULT_INJECTION" in {warning.code for warning in result.warnings}


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["llama", "deepseek", "nemotron_h", "grok1"])
def test_losses_after_fifty_drawn_faults_of_each_architecture(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, campaign: Callable[[str, int], None]
) -> None:
    campaign("injected faults, with restarts", 50)
    monkeypatch.setattr(hang_detector, "PAUSE_LIMIT_S", 20.0)  # a hang may follow a checkpoint
    config = small_run(steps=150, model=SMALL_MODELS[architecture])
    plan = draw_faults(config, "400/1000steps", step_s=None)
    faults = [replace(fault, slow_s=0.1, slow_steps=2) for fault in plan.faults[:50]]
    assert {fault.kind for fault in faults} == set(FAULT_KINDS)
    assert len(faults) == 50
    check(config, tmp_path, replace(plan, faults=tuple(faults)))
