"""`llmb-run submit --faults` and `--fault-rate`: the plan before a run, and a whole run through the command."""

import json
from pathlib import Path

import pytest

from llmb.cli.llmb_run import main

RUN = "submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 2 --proxy --on local --set steps=16"
CHECKPOINTS = "--set checkpoint_every=3"
FAULTS = [
    {"kind": "slow_rank", "step": 3, "rank": 1, "slow_s": 0.2, "slow_steps": 2},
    {"kind": "rank_killed", "step": 6, "rank": 1},
    {"kind": "hang", "step": 8},
    {"kind": "checkpoint_interrupted", "step": 9, "rank": 1},
    {"kind": "disk_full", "step": 12},
    {"kind": "node_lost", "step": 14},
]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(FAULTS))
    return path


def test_dry_run_lists_the_faults(plan: Path, capsys) -> None:
    assert main([*f"{RUN} {CHECKPOINTS} --dry-run --faults".split(), str(plan)]) == 0
    out = capsys.readouterr().out
    assert "faults injected on purpose (faults.json): slow_rank at step 3 on rank 1, rank_killed at step 6" in out
    assert "_proxy_faults6" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--faults PLAN", "add --set checkpoint_every=N"),
        (f"{CHECKPOINTS} --faults PLAN --fault-rate 3/day", "exclude each other"),
        (f"{CHECKPOINTS} --fault-rate 3/day", "give N/1000steps"),
        (f"{CHECKPOINTS} --fault-rate 3", "expected N/day or N/1000steps"),
        (f"{CHECKPOINTS} --faults .", "cannot read .: Is a directory"),
        ("--set max_restarts=2", "only native training restarts"),
    ],
)
def test_wrong_options_are_refused_in_one_line(plan: Path, capsys, options: str, message: str) -> None:
    assert main([*RUN.split(), "--dry-run", *options.replace("PLAN", str(plan)).split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.nightly
def test_a_run_restarts_after_every_kind_of_fault(plan: Path, capsys) -> None:
    settings = (
        f"{CHECKPOINTS} --set window=3-16 --seqlen 32 --set model.hidden=64 --set stall_limit_s=6 --json --no-report"
    )
    assert main([*f"{RUN} {settings} --faults".split(), str(plan)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["status"] == "ok"
    assert [fault["kind"] for fault in result["goodput"]["faults"]] == [fault["kind"] for fault in FAULTS]
    assert (result["goodput"]["restarts"], result["goodput"]["repeated_losses_differ"]) == (5, 0)
    assert result["goodput"]["repeated_steps"] >= 5
