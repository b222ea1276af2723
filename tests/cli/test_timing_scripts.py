"""The scripts of `common/` that the documents call, run as printed there."""

import csv
import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "golden" / "logs"


def run_script(script, *arguments, cwd):
    variables = {**os.environ, "PATH": "/usr/bin:/bin", "LLMB_INSTALL": str(cwd)}  # llmb-run is found beside the script
    command = [ROOT / "common" / script, *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)


@pytest.fixture
def experiments(tmp_path):
    folder = tmp_path / "workloads" / "pretrain_grok1" / "experiments"
    folder.mkdir(parents=True)
    shutil.copy(LOGS / "nemo.out", folder / "log-account-exp.pretrain_grok1_314b_bf16_256_388660_0.out")
    return folder


def test_table_of_the_grok_document(experiments):
    done = run_script("parse_train_timing.sh", experiments, cwd=experiments)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "Train Step Timing and TFLOPS Analysis (iterations 11-44)"
    headings = "  Status Time Mean (s) Time Std (s) TFLOPS_per_GPU Mean TFLOPS_per_GPU Std"
    assert lines[2] == f"{'Experiment':<90} {headings}"
    assert lines[4].split()[:2] == ["pretrain_grok1_314b_bf16_256_388660", "Success"]


def test_options_of_the_llama_document(experiments):
    """Without a folder, `experiments` in the current one; every log is read whatever engine wrote it."""
    done = run_script("parse_train_timing_mbridge.sh", "--format=csv", "--full-names", cwd=experiments.parent)
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert (row["filename"], row["status"]) == (
        "log-account-exp.pretrain_grok1_314b_bf16_256_388660_0.out",
        "Success",
    )
    assert row["iterations"] == "11-44"


def test_an_unset_workload_folder_is_named(tmp_path):
    done = run_script("parse_train_timing.sh", "/experiments", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ERROR: LLMB_WORKLOAD is not set")
