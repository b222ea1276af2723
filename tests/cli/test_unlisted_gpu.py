"""Machines whose GPU is not in the table: everything resolves, peaks are null, memory is what the driver reports."""

import json

import pytest
from fake_gpu import install_fake_gpu

EIGHT_B = ["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1"]
SERVE = ["-w", "inference_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1"]
MACHINES = [  # the driver's name, MiB, GPU type, whose row it takes
    ("NVIDIA GeForce RTX 4080", 16376, "rtx-4080", "h200"),
    ("Tesla T4", 15360, "tesla-t4", "h200"),
    ("NVIDIA H20", 144384, "h20-151gb", "h200"),  # the name of a row, with another memory
    ("NVIDIA Z9000", 300000, "z9000", "h200"),
]


@pytest.mark.parametrize(("name", "mib", "key", "lender"), MACHINES)
def test_runs_resolve_with_reported_memory_and_a_recorded_departure(
    llmb_run, monkeypatch, tmp_path, name, mib, key, lender
):
    install_fake_gpu(monkeypatch, tmp_path / "bin", name, mib)
    code, out, err = llmb_run("show", *EIGHT_B, "--json")
    assert (code, err) == (0, "")
    config = json.loads(out)
    assert config["machine"]["gpu"] == key
    assert config["machine"]["gpu_memory_bytes"] == mib << 20
    assert config["reference"] is None
    assert ("gpu", key, lender) in [(o["field"], o["value"], o["replaced"]) for o in config["overrides"]]
    code, out, err = llmb_run("submit", *EIGHT_B, "--proxy", "--dry-run", "--json")
    assert (code, err) == (0, "")
    assert (json.loads(out)["machine"]["gpu"], json.loads(out)["overrides"]) == (key, [])


@pytest.mark.parametrize(
    ("name", "mib", "key"),
    [("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"), ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb")],
)
def test_listed_gpu_of_this_machine_needs_no_gpu_type_where_recipes_have_no_row(
    llmb_run, monkeypatch, tmp_path, name, mib, key
):
    install_fake_gpu(monkeypatch, tmp_path / "bin", name, mib)
    code, out, _ = llmb_run("show", *EIGHT_B)
    assert (code, f"(no row for {key}: the settings of h200, the nearest in memory)" in " ".join(out.split())) == (
        0,
        True,
    )


def test_listed_gpu_of_this_machine_borrows_where_a_recipe_has_rows_for_it_only_in_other_sizes(
    llmb_run, monkeypatch, tmp_path
):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA H200", 143771)
    run = ["-w", "pretrain_llama3.1", "-s", "70b", "--dtype", "fp8", "--scale", "64"]
    code, out, _ = llmb_run("show", *run)
    assert (code, "departs from the recipe: gpu=h200 instead of the recipe's" in out) == (0, True)
    code, _, err = llmb_run("show", *run, "--gpu-type", "h200")  # names a row that does not exist
    assert (code, "--force takes a row of another GPU for h200" in err) == (1, True)


def test_pages_say_what_is_unknown(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA GeForce RTX 4080", 24564)
    code, out, _ = llmb_run("show", *EIGHT_B)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "machine 1 x rtx-4080 (not in the GPU table) on 1 node(s)" in lines
    assert "peak of one GPU - TFLOP/s" in lines
    assert "memory of one GPU 23.99 GiB" in lines
    borrowed = (
        "gpu=rtx-4080 instead of the recipe's h200 (no row for rtx-4080: the settings of h200, the nearest in memory)"
    )
    assert f"departs from the recipe: {borrowed}" in lines
    code, out, _ = llmb_run("submit", *EIGHT_B, "--dry-run")
    assert (code, borrowed in out) == (0, True)
    assert llmb_run("show", *SERVE)[0] == 0
    code, out, _ = llmb_run("show", *EIGHT_B, "--proxy", "true-width", "--seqlen", "2048")
    assert (code, "true width" in out) == (0, True)


def test_plan_is_made_without_rates_and_predicts_nothing(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA GeForce RTX 4080", 24564)
    code, out, err = llmb_run("plan", "-w", "outofcore_llama3", "-s", "8b", "--dtype", "bf16", "--proxy")
    assert (code, err) == (0, "")
    assert "not known: `llmb-run probe` measures this machine" in out
    assert "nominal: an H200's, as rtx-4080 was not measured" in out


def test_driver_that_does_not_report_memory_leaves_it_unknown(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA GB10", "[N/A]")
    code, out, _ = llmb_run("show", *EIGHT_B, "--json")
    assert (code, json.loads(out)["machine"]["gpu_memory_bytes"]) == (0, None)
    code, _, err = llmb_run("show", *EIGHT_B, "--proxy", "true-width")
    assert (code, "needs a memory budget; add --device-gb GIB" in err) == (1, True)


def test_unlisted_gpu_can_be_named_on_another_machine(llmb_run, monkeypatch, tmp_path):
    code, out, _ = llmb_run("show", *EIGHT_B, "--json", "--gpu-type", "unlisted:L40")
    assert (code, json.loads(out)["machine"]["gpu"]) == (0, "l40")
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA L40", 46068)
    code, out, _ = llmb_run("show", *EIGHT_B, "--json", "--gpu-type", "l40")
    assert (code, json.loads(out)["machine"]["gpu_memory_bytes"]) == (0, 46068 << 20)


def test_fp8_is_left_out_where_it_cannot_run_and_refused_where_it_is_named(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA GeForce RTX 3090", 24576)
    run = ["submit", "-w", "pretrain_llama3.1", "-s", "8b", "--scale", "1", "--proxy", "--dry-run", "--json"]
    code, out, err = llmb_run(*run)
    dtypes = {json.loads(line)["precision"]["dtype"] for line in out.splitlines()}
    assert (code, "fp8" in dtypes, "bf16" in dtypes) == (0, False, True)
    assert err == "note: rows in fp8 are left out: NVIDIA GeForce RTX 3090 has no fp8 GEMMs\n"
    code, _, err = llmb_run(*run, "--dtype", "fp8")
    assert code == 1
    assert "dtype fp8: NVIDIA GeForce RTX 3090 has no fp8 GEMMs; choose bf16" in err


def test_default_fp8_cache_gives_way_to_bf16_and_says_so(llmb_run, monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA A100-SXM4-80GB", 81920)
    run = ["show", "-w", "inference_llama3.1", "-s", "70b", "--dtype", "nvfp4", "--scale", "1"]
    code, out, _ = llmb_run(*run)
    line = "kv_dtype=bf16 instead of the recipe's fp8 (native engine: NVIDIA A100 SXM 80 GB has no fp8)"
    assert (code, line in " ".join(out.split())) == (0, True)
    code, _, err = llmb_run(*run, "--set", "kv_dtype=fp8")
    assert (code, "kv_dtype fp8: NVIDIA A100 SXM 80 GB has no fp8 GEMMs; choose bf16" in err) == (1, True)
