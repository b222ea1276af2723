"""Iterations of another engine's log that `llmb-run read` measures: those that `llmb-run timing` measures."""

import json
import shutil
from pathlib import Path

import pytest

LOGS = Path(__file__).parents[1] / "golden" / "logs"


@pytest.mark.parametrize(
    ("log", "name", "options", "steps"),
    [
        ("megatron_bridge.out", "log-exp.out", (), [35, 44]),
        ("megatron_bridge.out", "log-pretrain_grok1_314b.out", (), [11, 44]),
        ("megatron_bridge.out", "pretrain_nemotronh/log-exp.out", (), [11, 44]),
        ("nemo.out", "log-exp.out", (), [12, 45]),  # iterations 11-44: NeMo counts them from 0
        ("nemo.out", "log-exp.out", ("--window", "20-29"), [21, 30]),
    ],
)
def test_read_measures_what_timing_measures(llmb_run, tmp_path, log, name, options, steps):
    copy = tmp_path / name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(LOGS / log, copy)
    code, out, err = llmb_run("read", copy, "--json", *options)
    assert code == 0, err
    figures = json.loads(out)
    assert figures["window"] == steps
    style = "nemo" if log == "nemo.out" else "megatron_bridge"
    (row,) = json.loads(llmb_run("timing", copy.parent, "--style", style, "--format=json", *options)[1])["results"]
    mean = row["time_mean"] if style == "nemo" else row["time_mean_ms"] / 1000
    assert figures["step_time_s"]["mean"] == pytest.approx(mean, abs=1e-3)
