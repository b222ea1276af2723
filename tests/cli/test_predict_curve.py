"""`llmb-run predict` with several scales: which ones, what the curve prints of each."""

import json

import pytest

MODEL = ["predict", "--model", "llama3.1-8b", "--gpu-type", "h100"]


def test_a_curve_has_the_scales_that_hold_all_experts(llmb_run):
    """ep 8 x etp 4 of Grok-1 on GB200 take 32 GPUs, its tp 4 alone would take 4."""
    code, out, err = llmb_run("predict", "-w", "pretrain_grok1", "--gpu-type", "gb200", "--scale", "8..128", "--json")
    assert (code, err) == (0, "")
    assert [point["gpus"] for point in json.loads(out)] == [32, 64, 128]
    few = ["--model", "qwen3-30b-a3b", "--gpu-type", "b200", "--scale", "8..32", "--set", "ep=64"]
    code, _, err = llmb_run("predict", *few)
    assert code == 1
    assert "no scale of 8..32 is a multiple of 64" in err


def test_a_range_of_scales_is_a_curve(llmb_run):
    code, out, _ = llmb_run("predict", "-w", "pretrain_nemotronh", "-s", "56b", "--dtype", "fp8", "--gpu-type", "h100",
                            "--scale", "32..16384", "--json")  # fmt: skip
    points = json.loads(out)
    assert code == 0
    assert [point["gpus"] for point in points] == [32 << power for power in range(10)]
    assert all(point["gbs"] == 3 * point["gpus"] for point in points)


def test_a_curve_says_what_it_is_of(llmb_run):
    lines = llmb_run(*MODEL, "--scale", "8..32", "--set", "tp=2")[1].splitlines()
    assert lines[0].startswith("Llama-3.1-8B, bf16, h100, tp 2 pp 1")
    assert lines[0].endswith("engine megatron-bridge")
    assert "on 8 GPUs" in lines[-1]


def test_listed_scales_that_a_layout_cannot_have_are_refused_and_those_of_a_range_left_out(llmb_run):
    model = [*MODEL, "--set", "tp=8", "--set", "pp=2"]
    code, out, err = llmb_run(*model, "--scale", "4,8,16")
    assert (code, out, err) == (1, "", "ERROR: --scale 4, 8: the layout takes a multiple of 16 GPUs\n")
    code, out, err = llmb_run(*model, "--scale", "4..32")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.strip()[:1].isdigit()] == ["16", "32"]


def test_a_curve_names_the_scales_that_do_not_fit(llmb_run):
    model = ["predict", "--model", "llama3.1-70b", "--gpu-type", "h100", "--scale", "8..64", "--set", "fsdp=true"]
    model += ["--set", "recompute=full"]
    code, out, err = llmb_run(*model)
    memory = {item["gpus"]: item["memory_gib"] for item in json.loads(llmb_run(*model, "--json")[1])}
    assert (code, err) == (0, "")
    assert [gpus for gpus, gib in memory.items() if gib > 79.2] == [8]
    assert "does not fit in the memory of a GPU at 8 GPUs\n" in out
    lines = {int(line.split()[0]): line for line in out.splitlines() if line.strip()[:1].isdigit()}
    assert all(f" {gib:.0f} " in lines[gpus] for gpus, gib in memory.items())


def test_a_curve_has_the_cost_where_prices_are_given(llmb_run):
    curve = [*MODEL, "--scale", "8,16", "--gpu-cost-per-hour", "2"]
    costs = [point["energy"]["cost_per_million_tokens"] for point in json.loads(llmb_run(*curve, "--json")[1])]
    lines = [line.split() for line in llmb_run(*curve)[1].splitlines() if line.strip()[:1].isdigit()]
    assert [float(line[-1]) for line in lines] == pytest.approx(costs, rel=1e-3)
    assert "cost/1M tokens" not in llmb_run(*curve[:-2])[1]
