"""Injected faults in a Slurm job: it restarts within its allocation, and continues after Slurm requeues it."""

import json

import pytest
from slurm_test_runs import LLAMA, steps, wait_for, wait_for_result, wait_for_steps

from llmb.cli.stored_runs import load_events
from llmb.events import RunLaunched, StepDone
from llmb.launch.run_folder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]
FAULTS = [
    {"kind": "rank_killed", "step": 3, "rank": 1},
    {"kind": "checkpoint_interrupted", "step": 4, "rank": 0},
    {"kind": "hang", "step": 8, "rank": 1},
    {"kind": "node_lost", "step": 10, "rank": 1},
    {"kind": "disk_full", "step": 12, "rank": 0},
]
SHORT = [*LLAMA, "--scale", "2", "--set", "steps=12", "--set", "checkpoint_every=2", "--set", "stall_limit_s=8"]


def losses(run: RunFolder) -> dict[int, set]:
    by_step: dict[int, set] = {}
    for event in load_events(run, run.read_config()):
        if isinstance(event, StepDone):
            by_step.setdefault(event.step, set()).add((event.loss, event.grad_norm))
    return by_step


def test_job_restarts_after_each_fault(slurm, submit, tmp_path, campaign):
    campaign("injected faults, with restarts", len(FAULTS))
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps(FAULTS))
    undisturbed_job, undisturbed = submit(*SHORT, "--no-report")
    assert wait_for_result(slurm, undisturbed_job, undisturbed)["status"] == "ok"
    job, run = submit(*SHORT, "--no-report", "--faults", str(plan))
    result = wait_for_result(slurm, job, run)
    run = RunFolder.open(run.path)
    assert result["status"] == "ok", run.log.read_text()
    assert run.restart == result["goodput"]["restarts"] == len(FAULTS)
    assert [fault["kind"] for fault in result["goodput"]["faults"]] == [fault["kind"] for fault in FAULTS]
    assert losses(run) == losses(undisturbed)


def test_requeued_job_continues_from_its_newest_checkpoint(slurm, submit):
    settings = ["--set", "steps=100000", "--set", "checkpoint_every=5", "--set", "max_restarts=2"]
    job, run = submit(*LLAMA, "--scale", "2", *settings, "--slurm-arg", "requeue", "--no-report")
    wait_for_steps(run)
    wait_for(lambda: list(run.checkpoints.glob("step_*[0-9]")), event="a checkpoint")
    slurm.call("scontrol", "requeue", job)
    restarted = wait_for(lambda: (folder := RunFolder.open(run.path)).restart and folder, event="the restart")
    wait_for_steps(restarted)
    slurm.call("scancel", job)
    wait_for_result(slurm, job, run)
    launched = [event for event in load_events(restarted, run.read_config()) if isinstance(event, RunLaunched)]
    assert [event.start for event in launched] == [0, 1]
    assert launched[1].step % 5 == 0
    assert launched[1].step > 0
    assert steps(restarted)[0].step == launched[1].step + 1
