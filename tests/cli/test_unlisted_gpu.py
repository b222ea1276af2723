"""Machines whose GPU is not in the table: everything resolves, peaks are null, memory is what the driver reports."""

import json

import pytest
from fake_gpu import install_fake_gpu

EIGHT_B = ["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1"]
SERVE = ["-w", "inference_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1"]
MACHINES = [  # the driver's name, MiB, GPU type
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA H20", 97871, "h20"),
    ("NVIDIA GH200 480GB", 97871, "gh200-480gb"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
    ("NVIDIA A100-SXM4-40GB", 40960, "a100-sxm4-40gb"),
    ("NVIDIA A100-PCIE-40GB", 40960, "a100-pcie-40gb"),
]


@pytest.mark.parametrize(("name", "mib", "key"), MACHINES)
def test_runs_resolve_with_reported_memory_and_a_recorded_departure(llmb_run, monkeypatch, tmp_path, name, mib, key):
    install_fake_gpu(monkeypatch, tmp_path / "bin", name, mib)
    code, out, err = llmb_run("show", *EIGHT_B, "--json")
    assert (code, err) == (0, "")
    config = json.loads(out)
    assert config["machine"]["gpu"] == key
    assert config["machine"]["gpu_memory_bytes"] == mib << 20
    assert config["reference"] is None
    assert ("gpu", key) in [(o["field"], o["value"]) for o in config["overrides"]]
    code, out, err = llmb_run("submit", *EIGHT_B, "--proxy", "--dry-run", "--json")
    assert (code, err) == (0, "")
    assert (json.loads(out)["machine"]["gpu"], json.loads(out)["overrides"]) == (key, [])


def test_pages_say_what_is_unknown(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA GeForce RTX 4090", 24564)
    code, out, _ = llmb_run("show", *EIGHT_B)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "machine 1 x rtx-4090 (not in the GPU table) on 1 node(s)" in lines
    assert "peak of one GPU - TFLOP/s" in lines
    assert "memory of one GPU 23.99 GiB" in lines
    assert any(line.endswith("rtx-4090 no row for rtx-4090: settings of another GPU") for line in lines)
    code, out, _ = llmb_run("submit", *EIGHT_B, "--dry-run")
    assert (code, "(no row for rtx-4090: settings of another GPU)" in out) == (0, True)
    assert llmb_run("show", *SERVE)[0] == 0
    code, out, _ = llmb_run("show", *EIGHT_B, "--proxy", "true-width", "--seqlen", "2048")
    assert (code, "true width" in out) == (0, True)


def test_plan_is_made_without_rates_and_predicts_nothing(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA GeForce RTX 4090", 24564)
    code, out, err = llmb_run("plan", "-w", "outofcore_llama3", "-s", "8b", "--dtype", "bf16", "--proxy")
    assert (code, err) == (0, "")
    assert "not known: `llmb-run probe` measures this machine" in out
    assert "nominal: an H200's, as rtx-4090 was not measured" in out


def test_driver_that_does_not_report_memory_leaves_it_unknown(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA GB10", "[N/A]")
    code, out, _ = llmb_run("show", *EIGHT_B, "--json")
    assert (code, json.loads(out)["machine"]["gpu_memory_bytes"]) == (0, None)
    code, _, err = llmb_run("show", *EIGHT_B, "--proxy", "true-width")
    assert (code, "needs a memory budget; add --device-gb GIB" in err) == (1, True)


def test_unlisted_gpu_can_be_named_on_another_machine(llmb_run, monkeypatch, tmp_path):
    code, out, _ = llmb_run("show", *EIGHT_B, "--json", "--gpu-type", "unlisted:L40S")
    assert (code, json.loads(out)["machine"]["gpu"]) == (0, "l40s")
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA L40S", 46068)
    code, out, _ = llmb_run("show", *EIGHT_B, "--json", "--gpu-type", "l40s")
    assert (code, json.loads(out)["machine"]["gpu_memory_bytes"]) == (0, 46068 << 20)
