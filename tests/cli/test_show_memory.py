"""`llmb-run show --memory`: one rank of a run at full size, without its hardware."""

import json
from typing import Any

import pytest

from llmb.cli.llmb_run import main
from llmb.launch import torch_process
from llmb.launch.command import engine_install_command
from llmb.perfmodel.dry_run_summary import DryRunSummary

ROW = [
    "show",
    "-w",
    "pretrain_llama3.1",
    "-s",
    "1b",
    "--dtype",
    "bf16",
    "--scale",
    "1",
    "--gpu-type",
    "h200",
    "--memory",
]


@pytest.mark.slow
def test_memory_as_a_table_and_as_json(capsys, monkeypatch) -> None:
    run_dry_run, summaries = torch_process.run_dry_run, []

    def run_once(*arguments: Any) -> DryRunSummary:
        summaries.append(summaries[0] if summaries else run_dry_run(*arguments))
        return summaries[0]

    monkeypatch.setattr(torch_process, "run_dry_run", run_once)
    assert main([*ROW, "--set", "gbs=4"]) == 0
    text = capsys.readouterr().out
    assert "activations at the peak" in text
    assert "fits" in text
    assert main([*ROW, "--set", "gbs=4", "--json"]) == 0
    dry_run = json.loads(capsys.readouterr().out)
    assert dry_run["parameters"] == 1_235_814_400
    assert dry_run["peak_bytes"] > 16 * dry_run["parameters"]
    assert len(summaries) == 2


def test_show_memory_without_torch_says_what_to_install(capsys, monkeypatch) -> None:
    monkeypatch.setattr("llmb.launch.torch_process.find_spec", lambda name: None)
    assert main(ROW) == 1
    message = f"--memory needs torch, which is not installed: {engine_install_command()}"
    assert capsys.readouterr().err == f"ERROR: {message}\n"


def test_only_training_has_a_dry_run(capsys) -> None:
    target = ["-w", "inference_deepseek-r1", "-s", "671b", "--dtype", "nvfp4", "--scale", "4", "--gpu-type", "gb200"]
    assert main(["show", *target, "--memory"]) == 1
    assert "--memory: only training runs have a dry run, not those of kind inference" in capsys.readouterr().err


def test_dry_run_says_at_once_that_it_runs(capsys, monkeypatch) -> None:
    monkeypatch.setattr("llmb.launch.torch_process.DRY_RUN_MODULE", "llmb.no_such_module")
    assert main(ROW) == 1
    first, _ = capsys.readouterr().err.splitlines()
    assert first.startswith("dry run of one rank of pretrain_llama3.1_1b_bf16_gpus1")
    assert first.endswith(": 0 s, often 20 s")
