"""`llmb-run show --memory`: one rank of a run at full size, without its hardware."""

import json

import pytest

from llmb.cli.llmb_run import main

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
def test_memory_as_a_table_and_as_json(capsys) -> None:
    assert main([*ROW, "--set", "gbs=4"]) == 0
    text = capsys.readouterr().out
    assert "activations at the peak" in text
    assert "fits" in text
    assert main([*ROW, "--set", "gbs=4", "--json"]) == 0
    dry_run = json.loads(capsys.readouterr().out)
    assert dry_run["parameters"] == 1_235_814_400
    assert dry_run["peak_bytes"] > 16 * dry_run["parameters"]


def test_show_memory_without_torch_says_what_to_install(capsys, monkeypatch) -> None:
    monkeypatch.setattr("llmb.launch.torch_process.find_spec", lambda name: None)
    assert main(ROW) == 1
    message = "--memory needs torch, which is not installed: pip install 'llmb[engine]'"
    assert capsys.readouterr().err == f"ERROR: {message}\n"


def test_only_training_has_a_dry_run(capsys) -> None:
    target = ["-w", "inference_deepseek-r1", "-s", "671b", "--dtype", "nvfp4", "--scale", "4", "--gpu-type", "gb200"]
    assert main(["show", *target, "--memory"]) == 1
    assert "--memory: only training runs have a dry run, not those of kind inference" in capsys.readouterr().err
