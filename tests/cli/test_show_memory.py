"""`llmb-run show --memory`: a rank of a run at its real size, without its hardware."""

import json

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


def test_a_table_for_people_and_the_data_for_programs(capsys) -> None:
    assert main([*ROW, "--set", "gbs=4"]) == 0
    text = capsys.readouterr().out
    assert "activations at the peak" in text
    assert "fits" in text
    assert main([*ROW, "--set", "gbs=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 1_235_814_400
    assert found["peak_bytes"] > 16 * found["parameters"]


def test_without_torch_it_says_what_to_install(capsys, monkeypatch) -> None:
    monkeypatch.setattr("llmb.launch.dry_run_process.find_spec", lambda name: None)
    assert main(ROW) == 1
    said = "--memory needs torch, which is not installed: pip install 'llmb[engine]'"
    assert capsys.readouterr().err == f"ERROR: {said}\n"


def test_only_training_can_be_rehearsed(capsys) -> None:
    named = ["-w", "inference_deepseek-r1", "-s", "671b", "--dtype", "nvfp4", "--scale", "4", "--gpu-type", "gb200"]
    assert main(["show", *named, "--memory"]) == 1
    assert "--memory: runs of kind training can be rehearsed, not those of kind inference" in capsys.readouterr().err
