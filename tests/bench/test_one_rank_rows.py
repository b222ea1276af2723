"""Rows of bench/one_rank_gpu.py: each resolves, fits on the H200 that measures it, and has its published layout."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
from fake_gpu import install_fake_gpu

from llmb.config.serialization import build
from llmb.config.spec import RunConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
one_rank_gpu = import_module("one_rank_gpu")
ROWS, explain = one_rank_gpu.ROWS, one_rank_gpu.explain


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_row_fits_and_is_labelled_by_its_layout(row, llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA H200", 143771)
    arguments = row.command(tiny=False)
    code, out, err = llmb_run(*arguments[arguments.index("submit") :], "--dry-run", "--json")
    assert (code, err) == (0, "")
    config = build(RunConfig, json.loads(out), "config")
    assert config.machine.gpus == row.scale
    split = {name: getattr(config.parallel, name) for name in ("tp", "pp", "cp", "ep")}
    named = " ".join([*(["fsdp"] if config.parallel.fsdp else []), *(f"{k}{n}" for k, n in split.items() if n > 1)])
    assert row.title.endswith(f"{row.dtype} {named}")
    if config.reference is not None:
        assert config.reference.step_time_s == row.published_s


def test_differences_are_measured_minus_predicted(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA H200", 143771)
    arguments = ROWS[0].command(tiny=False)
    _, out, _ = llmb_run(*arguments[arguments.index("submit") :], "--dry-run", "--json")
    config = build(RunConfig, json.loads(out), "config")
    step = {"measured_s": 13.0, "communication_s": {"tp": 3.0, "dp": 0.5}, "bubble_s": 0.0}
    slower = explain(config, {**step, "measured_s": 14.0})
    assert slower["compute"] - explain(config, step)["compute"] == pytest.approx(1.0)
    assert slower["bubble"] == 0.0
