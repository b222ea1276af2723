"""Restarts: which failures restart a run, from where, and with what is left of its plan and its time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmb.config.faults.fault_plan import Fault, FaultInjection
from llmb.config.serialization import build, read_json
from llmb.config.spec import Limits, RunConfig, Status
from llmb.events import FaultInjected, RunLaunched, StepDone, append, read
from llmb.launch.local import RunOutcome
from llmb.launch.restarts.restart_loop import newest_checkpoint, run_with_restarts
from llmb.launch.run_folder import RunFolder


@pytest.fixture
def restarting(config: RunConfig) -> RunConfig:
    faults = tuple(Fault(kind="rank_killed", step=step) for step in (2, 3))
    return replace(
        config,
        workload=replace(config.workload, steps=9, checkpoint_every=1),
        limits=Limits(max_restarts=2, time_limit_s=100),
        fault_injection=FaultInjection(faults=faults, source="f.yaml"),
    )


def outcome(status: Status, exit_code: int = 2, interrupted: int | None = None) -> RunOutcome:
    return RunOutcome(status, "why", exit_code, 1.0, interrupted)


def starts_of(*outcomes: RunOutcome, step: bool = True) -> tuple[list[RunConfig], Callable]:
    """A start that does one step, writes its checkpoint, injects a fault and ends as listed."""
    seen: list[RunConfig] = []

    def start(config: RunConfig, run: RunFolder) -> RunOutcome:
        number = len(seen) + 1
        seen.append(config)
        if step:
            append(run.events(0), StepDone(step=number, seconds=1.0, time=1.0))
            append(run.events(0), FaultInjected(time=1.0, rank=0, fault=number - 1, kind="rank_killed", step=number))
            (run.checkpoints / f"step_{number}").mkdir(parents=True)
            (run.checkpoints / f"step_{number + 1}.partial").mkdir()
        return outcomes[number - 1]

    return seen, start


def test_each_restart_continues_from_the_newest_complete_checkpoint(restarting: RunConfig, run_folder: RunFolder):
    seen, start = starts_of(outcome("failed"), outcome("oom"), outcome("ok", 0))
    last, end = run_with_restarts(restarting, run_folder, start)
    assert (end.status, last.restart, len(seen)) == ("ok", 2, 3)
    assert [config.workload.resume and Path(config.workload.resume).name for config in seen] == [
        None,
        "step_1",
        "step_2",
    ]
    assert [config.fault_injection.injected for config in seen] == [(), (0,), (0, 1)]
    assert [index for index, _ in seen[1].fault_injection.pending()] == [1]
    assert build(RunConfig, read_json(last.start_config)) == seen[2]
    launched = [event for start in last.starts for event in read(start.events(0)) if isinstance(event, RunLaunched)]
    assert [(event.start, event.step) for event in launched] == [(0, 0), (1, 1), (2, 2)]
    assert (last.work / "checkpoints").resolve() == (run_folder.path / "checkpoints").resolve()
    assert newest_checkpoint(last).name == "step_3"
    assert all(config.limits.time_limit_s >= 99 for config in seen)


@pytest.mark.parametrize("end", [outcome("ok", 0), outcome("timeout"), outcome("diverged"), outcome("failed", 2, 15)])
def test_other_ends_do_not_restart(restarting: RunConfig, run_folder: RunFolder, end: RunOutcome):
    seen, start = starts_of(end)
    last, final = run_with_restarts(restarting, run_folder, start)
    assert (len(seen), last.restart, final.status) == (1, 0, end.status)


def test_a_refused_configuration_does_not_restart(restarting: RunConfig, run_folder: RunFolder):
    seen, start = starts_of(outcome("failed", 1), step=False)
    run_with_restarts(restarting, run_folder, start)
    assert len(seen) == 1


def test_torchrun_exits_with_1_for_any_failure(restarting: RunConfig, run_folder: RunFolder):
    seen, start = starts_of(outcome("failed", 1), outcome("ok", 0))
    run_with_restarts(restarting, run_folder, start)
    assert len(seen) == 2


def test_restarts_end_with_their_number(restarting: RunConfig, run_folder: RunFolder):
    seen, start = starts_of(*[outcome("failed")] * 5)
    last, final = run_with_restarts(restarting, run_folder, start)
    assert (len(seen), final.status) == (3, "failed")
    assert RunFolder.open(run_folder.path) == last


def test_a_run_without_restarts_writes_nothing_more(config: RunConfig, run_folder: RunFolder):
    before = sorted(run_folder.path.iterdir())
    last, final = run_with_restarts(config, run_folder, lambda config, run: outcome("failed"))
    assert (last, final.status) == (run_folder, "failed")
    assert sorted(run_folder.path.iterdir()) == before
