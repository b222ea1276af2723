"""Runs that do not fit are refused before anything is created, with the numbers and what would fit."""

from dataclasses import replace

import pytest

from llmb.cli import memory_check
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError
from llmb.perfmodel.hardware import GIB

LLAMA = ["submit", "-w", "pretrain_llama3.1"]
LARGE_BATCH = [*LLAMA, "-s", "405b", "-d", "fp8", "--scale", "128", "--set", "mbs=64", "--set", "gbs=4096"]
PROXY = [*LLAMA, "-s", "8b", "-d", "bf16", "--proxy"]


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(memory_check, "available_memory_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(memory_check, "gpu_names", lambda: [])


def test_submission_that_exceeds_the_gpu_is_refused_with_numbers_and_a_remedy(llmb_run, tmp_path):
    code, out, err = llmb_run(*LARGE_BATCH, "--gpu-type", "gb200", "--on", "slurm")
    assert (code, out) == (1, "")
    assert "Llama-3.1-405B needs about 4,098.3 GiB on each GPU (weights 21.7, " in err
    assert "a gb200 has 184.3 GiB, 178.8 GiB of them usable; --set mbs=1 fits" in err
    assert err.endswith("; --force runs it anyway\n")
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("llmb/workloads"))


def test_dry_run_lists_such_a_run_and_warns(llmb_run):
    code, out, err = llmb_run(*LARGE_BATCH, "--gpu-type", "gb200", "--dry-run")
    assert code == 0
    assert "mbs64" in out
    assert err.startswith("warning: would be refused: Llama-3.1-405B needs about 4,098.3 GiB")


@pytest.mark.parametrize(
    ("options", "needs", "remedy"),
    [
        (["--scale", "64"], "29.1 GiB of host memory for 64 ranks; 4.0 GiB are available", "--scale 8 or less fits"),
        (
            ["--scale", "1", "--set", "mbs=1000000000", "--set", "gbs=1000000000"],
            "of host memory for 1 rank; 4.0 GiB are available",
            "--set mbs=512 fits",
        ),
    ],
)
def test_proxy_beyond_the_host_memory_is_refused(llmb_run, little_memory, tmp_path, options, needs, remedy):
    code, _, err = llmb_run(*PROXY, *options, "--on", "local")
    assert code == 1
    assert err.startswith("ERROR: the proxy of Llama-3.1-8B needs about ")
    assert needs in err
    assert err.endswith(f"; {remedy}; --force runs it anyway\n")
    assert not list(tmp_path.glob("llmb/workloads"))


def test_force_runs_it_with_a_warning(little_memory, recipes, capsys):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="bf16", gpus=64, proxy="small"))
    memory_check.check_memory([config], recipes, local=True, force=True)
    assert capsys.readouterr().err.startswith("warning: the proxy of Llama-3.1-8B needs about 29.1 GiB")


def test_every_misfit_of_several_runs_is_listed(little_memory, recipes, capsys):
    requests = [RunRequest(size="8b", dtype="bf16", gpus=gpus, proxy="small") for gpus in (64, 32, 2)]
    configs = [resolve(recipes["pretrain_llama3.1"], request) for request in requests]
    with pytest.raises(ConfigError, match="2 of 3 runs do not fit into memory; nothing was started"):
        memory_check.check_memory(configs, recipes, local=True)
    assert capsys.readouterr().err.count("ERROR: pretrain_llama3.1_8b_bf16_gpus") == 2


def test_unknown_gpu_memory_is_said_and_not_checked(recipes, capsys):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="70b", dtype="fp8", gpus=64, gpu="h100"))
    elsewhere = replace(config, machine=replace(config.machine, gpu="l40"))
    memory_check.check_memory([elsewhere], recipes, local=False)
    line = "note: the memory of l40 is not known, so whether the run fits is not checked\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("gpu", "dtype"), [("h100", "bf16"), ("h100", "fp8"), ("a100", "bf16")])
def test_model_too_large_for_one_gpu_is_pointed_out_of_core(llmb_run, gpu, dtype):
    code, _, err = llmb_run(*LLAMA, "-s", "8b", "--dtype", dtype, "--scale", "1", "--gpu-type", gpu)
    assert code == 1
    assert err.endswith("; on one GPU it trains out of core: -w outofcore_llama3 -s 8b\n")


def test_node_of_a_job_is_checked_too(recipes, monkeypatch):
    """Offloaded activations of all ranks of a node are in its host memory; --force starts them all the same."""
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="405b", dtype="fp8", gpus=128, gpu="gb200"))
    monkeypatch.setattr(memory_check, "available_memory_bytes", lambda: 900 * GIB)
    memory_check.check_node_memory(config, force=False)
    monkeypatch.setattr(memory_check, "available_memory_bytes", lambda: 400 * GIB)
    memory_check.check_node_memory(config, force=True)
    with pytest.raises(
        ConfigError, match=r"needs about 4\d\d\.\d GiB of host memory for 4 ranks; 400.0 GiB are available"
    ):
        memory_check.check_node_memory(config, force=False)
