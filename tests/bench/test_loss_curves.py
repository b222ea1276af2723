"""bench/loss_curves.py: rows of the recipes, the row's own peak at a smaller batch, the program with a proxy."""

import json
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
loss_curves = import_module("loss_curves")
ROWS = {row.title: row for row in loss_curves.ROWS}


def test_a_smaller_batch_keeps_the_peak_of_the_row(tmp_path):
    settings, work = loss_curves.row_settings(ROWS["llama3.1 8b bf16"], Namespace(steps=50, gbs=3), tmp_path)
    assert work["lr"] == 3e-5
    assert settings == ["steps=50", "gbs=3", "lr=3e-05", "mbs=1"]


def test_an_unknown_row_is_refused_with_the_choices():
    done = subprocess.run(
        [sys.executable, BENCH / "loss_curves.py", "--rows", "9b"],
        capture_output=True, text=True, env={"PYTHONPATH": str(BENCH.parent)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "no row is called 9b; rows are: llama3.1 1b bf16, " in done.stderr


def test_the_curve_ends_with_the_last_step():
    assert loss_curves.curve([]) == ""
    assert loss_curves.curve([3.0, 2.0]) == "1:3.00 2:2.00"
    assert loss_curves.curve([float(n) for n in range(50)]).endswith("46:45.00 50:49.00")


@pytest.mark.slow
@pytest.mark.nightly  # loss curves of training are compared by tests/train, and the parts of the program above
def test_the_program_judges_a_proxy(tmp_path):
    command = [sys.executable, BENCH / "loss_curves.py", "--proxy", "--rows", "deepseek-v3 671b fp32", "--steps", "8"]
    done = subprocess.run(
        [*command, "--json", tmp_path / "runs.json", "--budget", "300"],
        capture_output=True, text=True, env={"PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no loss ended above its first\n")
    (run,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert (run["status"], run["rose"], len(run["losses"])) == ("ok", False, 8)
