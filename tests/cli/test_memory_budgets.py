"""Warnings about budgets that exceed this machine's memory, only for runs planned for it."""

from dataclasses import replace

import pytest

from llmb.cli import memory_budgets
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Machine
from llmb.perfmodel.hardware import GIB


@pytest.fixture
def config(recipes):
    """Proxy on an H200 with its own budgets."""
    config = resolve(recipes["outofcore_llama3"], RunRequest(size="3b", dtype="bf16", gpus=1, proxy="small"))
    return replace(config, machine=Machine(gpu="h200", gpus=1, gpus_per_node=8))


def with_budgets(config, host_gib, device_gib):
    return replace(config, workload=replace(config.workload, host_gib=host_gib, device_gib=device_gib))


@pytest.fixture
def h200_here(monkeypatch):
    monkeypatch.setattr(memory_budgets, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(memory_budgets, "gpu_memory_bytes", lambda: 139 * GIB)
    monkeypatch.setattr(memory_budgets, "host_memory_bytes", lambda: 125 * GIB)


@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        (110.0, 130.0, []),
        (178.0, 78.0, ["178 GiB of host memory, this machine has 125.0; the run will fail unless --host-gb is lower"]),
        (75.0, 140.0, ["140 GiB of device memory, this machine has 139.0"]),
        (178.0, 140.0, ["of host memory", "of device memory"]),
    ],
)
def test_each_budget_beyond_this_machine_has_a_warning(h200_here, config, host, device, expected):
    lines = list(memory_budgets.beyond_this_machine(with_budgets(config, host, device)))
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True))


def test_plan_for_another_gpu_type_is_not_compared_with_this_machine(h200_here, config):
    elsewhere = replace(with_budgets(config, 1000.0, 1000.0), machine=Machine(gpu="h100", gpus=1, gpus_per_node=8))
    assert not list(memory_budgets.beyond_this_machine(elsewhere))


def test_on_a_cpu_both_budgets_share_the_host_memory(monkeypatch, config):
    monkeypatch.setattr(memory_budgets, "gpu_names", lambda: [])
    monkeypatch.setattr(memory_budgets, "host_memory_bytes", lambda: 8 * GIB)
    on_cpu = replace(with_budgets(config, 5.0, 4.0), machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1024))
    (line,) = memory_budgets.beyond_this_machine(on_cpu)
    assert "9 GiB of host memory, this machine has 8.0" in line


def test_training_runs_have_no_budgets(h200_here, recipes):
    training = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    assert not list(memory_budgets.beyond_this_machine(training))
