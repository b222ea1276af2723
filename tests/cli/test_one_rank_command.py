"""`llmb-run submit --one-rank`: the dry run, the page of `show`, and requests in error."""

import json

import pytest
from fake_gpu import install_fake_gpu

NEMOTRON = ["-w", "pretrain_nemotronh", "-s", "56b", "-d", "fp8", "--scale", "32", "--gpu-type", "h100"]


@pytest.fixture
def h200(monkeypatch, tmp_path):
    install_fake_gpu(monkeypatch, tmp_path / "bin", "NVIDIA H200", 143771)


def test_dry_run_says_which_rank_runs_where(llmb_run, h200):
    code, out, err = llmb_run("submit", *NEMOTRON, "--one-rank", "--dry-run")
    assert (code, err) == (0, "")
    assert "one rank only: rank 0 of 32, on NVIDIA H200 SXM; communication and bubble are modelled" in out
    code, out, _ = llmb_run("submit", *NEMOTRON, "--one-rank", "5", "--dry-run", "--json")
    one_rank = json.loads(out)["one_rank"]
    assert (one_rank["rank"], one_rank["machine"]["gpu"], one_rank["machine"]["gpus"]) == (5, "h200", 1)


def test_show_starts_one_process(llmb_run, h200):
    code, out, _ = llmb_run("show", *NEMOTRON, "--one-rank")
    assert code == 0
    assert "one rank only: rank 0 of 32" in out
    assert "command: python -m llmb.train config.json" in out
    assert "fits, by the estimate" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--one-rank", "x"], "--one-rank: expected the number of a rank, from 0, or nothing, got 'x'"),
        (["--one-rank", "32"], "--one-rank 32: the layout has the ranks 0 to 31"),
        (
            ["--one-rank", "--on", "slurm"],
            "--one-rank runs on one GPU of this machine, not through Slurm; add --on local",
        ),
    ],
)
def test_invalid_request_is_one_line(llmb_run, h200, options, message):
    code, out, err = llmb_run("submit", *NEMOTRON, *options)
    assert (code, out) == (1, "")
    assert err == f"ERROR: {message}\n"


def test_a_machine_without_a_gpu_refuses_the_model(llmb_run, monkeypatch):
    monkeypatch.setattr("llmb.launch.local_machine.gpu_names", lambda: [])
    code, _, err = llmb_run("submit", *NEMOTRON, "--one-rank")
    assert code == 1
    assert err.startswith("ERROR: 1 x h100 requested, this machine has no GPU; ")
