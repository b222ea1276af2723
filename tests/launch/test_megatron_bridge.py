"""Megatron-Bridge's script: its arguments as golden text for every supported row, and as a process with a Result."""

import shlex
import sys
from ast import literal_eval
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from llmb.cli.stored_runs import write_result
from llmb.config.overrides import Setting
from llmb.config.recipe import Row, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.launch.command import (
    build_launch_spec,
    check_engine,
    engine_command,
    engine_environment,
    format_engine_command,
)
from llmb.launch.engines import megatron_bridge
from llmb.launch.hang_detector import HangDetector
from llmb.launch.local import run_local
from llmb.launch.run_folder import RunFolder

GOLDEN = Path(__file__).parent.parent / "golden"
RECIPES = load_all([shipped()])
TRACED = (
    "node1:77:99 [0] NCCL INFO AllReduce: opCount 2 sendbuff 0x7ffb4713c200 recvbuff 0x7ffb4713c200 count 1024 "
    "datatype 7 op 0 root 0 comm 0x55556b100660 [nranks=2] stream 0x5555630c58b0\n"
)


def bridge_config(target: str, row: Row, dtype: str = "fp8", gpus: int | None = None, **fields: str) -> RunConfig:
    picks = {"engine": "megatron_bridge", **fields}
    settings = tuple(Setting(field=name, value=value, source="--set") for name, value in picks.items())
    gpus = gpus or int(str(row["gpus"]).split("-")[0])
    return resolve(
        RECIPES[target], RunRequest(size=row["size"], dtype=dtype, gpus=gpus, gpu=row["gpu"], settings=settings)
    )


def supported_rows() -> list[tuple[str, Row]]:
    """Return every row of every recipe that Megatron-Bridge supports, on its GPUs."""
    rows = [(target, row) for target, recipe in RECIPES.items() for row in recipe.rows]
    return [
        (target, row)
        for target, row in rows
        if (target, row.get("size")) in megatron_bridge.RECIPES and row["gpu"] in megatron_bridge.GPUS
    ]


def name(case: tuple[str, Row]) -> str:
    target, row = case
    return f"{target}_{row['size']}_{row['gpu']}_{str(row['gpus']).split('-')[0]}"


@pytest.mark.parametrize("case", supported_rows(), ids=name)
def test_arguments_of_every_row_match_the_golden_file(case: tuple[str, Row]) -> None:
    text = (GOLDEN / "megatron_bridge" / f"{name(case)}.txt").read_text()
    assert format_engine_command(bridge_config(*case), {"MEGATRON_BRIDGE": "/opt/Megatron-Bridge"}) == text


def test_every_supported_row_has_a_golden_file() -> None:
    assert sorted(path.stem for path in (GOLDEN / "megatron_bridge").iterdir()) == sorted(map(name, supported_rows()))
    assert {(target, row["size"]) for target, row in supported_rows()} == set(megatron_bridge.RECIPES)
    assert len(supported_rows()) == 13


@pytest.mark.parametrize("case", supported_rows(), ids=name)
def test_arguments_hold_every_cell_of_the_row(case: tuple[str, Row]) -> None:
    """Independent of the golden files: every cell, looked up in the arguments of the script."""
    config, row = bridge_config(*case), case[1]
    work = config.workload
    assert isinstance(work, Training)
    arguments = megatron_bridge.arguments(config)
    flags = dict(pairwise(arguments))
    for flag, cell in (("tensor_model", "tp"), ("pipeline_model", "pp"), ("context", "cp")):
        assert int(flags[f"--{flag}_parallel_size"]) == row[cell]
    assert flags["--virtual_pipeline_model_parallel_size"] == str(row["vp"])
    assert flags["--use_megatron_fsdp"] == str(row.get("fsdp", False)).lower()
    assert (int(flags["--micro_batch_size"]), int(flags["--seq_length"])) == (row["mbs"], row["seqlen"])
    assert int(flags["--global_batch_size"]) == work.mbs * work.ga * config.parallel.dp
    # Megatron counts in each virtual stage, a row on the whole pipeline rank.
    recomputed = int(flags.get("--recompute_num_layers", 0)) * (row["vp"] or 1)
    assert recomputed == row.get("recompute_layers", 0)
    assert int(flags.get("--activation_offload_layers", 0)) == row.get("offload_layers", 0)
    assert ("--cuda_graph_impl" in flags) == (not row.get("cuda_graphs", False))
    assert flags["--compute_dtype"] == "fp8_cs"
    assert not [argument for argument in arguments if argument.startswith("profiling.")]


def test_check_refuses_unsupported_rows(tmp_path: Path) -> None:
    target, row = supported_rows()[0]
    config = bridge_config(target, row)
    with pytest.raises(ConfigError, match="MEGATRON_BRIDGE=FOLDER"):
        check_engine(config, {})
    with pytest.raises(ConfigError, match=r"holds no scripts/performance/run_script.py; is it a checkout"):
        check_engine(config, {"MEGATRON_BRIDGE": str(tmp_path)})
    with pytest.raises(ConfigError, match="use the absolute path /"):
        check_engine(config, {"MEGATRON_BRIDGE": "Megatron-Bridge"})
    check_engine(config, {"MEGATRON_BRIDGE": "/opt/Megatron-Bridge"}, local=False, in_container=True)
    h200 = next(row for row in RECIPES["pretrain_llama3.1"].rows if row["gpu"] == "h200" and row["size"] == "8b")
    with pytest.raises(ConfigError, match="does not run bf16 on h200; it runs bf16, fp8, nvfp4 on h100"):
        check_engine(bridge_config("pretrain_llama3.1", h200, "bf16"), {})
    grok = RECIPES["pretrain_grok1"].rows[0]
    with pytest.raises(ConfigError, match=r"no recipe for pretrain_grok1 314b; it has pretrain_llama3\.1 405b"):
        check_engine(bridge_config("pretrain_grok1", grok), {})


def test_profiling_and_dtypes_reach_the_script() -> None:
    h100 = next(row for row in RECIPES["pretrain_llama3.1"].rows if row["gpu"] == "h100" and row["size"] == "8b")
    config = bridge_config("pretrain_llama3.1", h100, profile="true", profile_ranks="0")
    config = replace(config, precision=replace(config.precision, dtype="bf16"))
    arguments = megatron_bridge.arguments(config)
    assert arguments[arguments.index("--compute_dtype") + 1] == "bf16"
    assert arguments[-4:] == [
        "profiling.use_nsys_profiler=true",
        "profiling.profile_step_start=45",
        "profiling.profile_step_end=50",
        "profiling.profile_ranks=[0]",
    ]
    by_torch = replace(config, profile=replace(config.profile, profiler="torch", profile_ranks=()))
    assert megatron_bridge.arguments(by_torch)[-4] == "profiling.use_pytorch_profiler=true"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Fake checkout whose script records its arguments and variables, then prints a log."""
    scripts = tmp_path / "Megatron Bridge" / "scripts" / "performance"
    scripts.mkdir(parents=True)
    log = GOLDEN / "logs" / "megatron_bridge.out"
    (scripts / "run_script.py").write_text(
        "import os, sys\n"
        "open(f\"calls.{os.environ['RANK']}\", 'w').write(repr((sys.argv[1:], os.environ['HF_HUB_OFFLINE'])))\n"
        f"print(open({str(log)!r}).read() + {TRACED!r}) if os.environ['RANK'] == '0' else None\n"
    )
    return scripts.parent.parent


def test_newer_checkout_is_started_by_its_bootstrap(checkout: Path, tmp_path: Path) -> None:
    config = bridge_config(*supported_rows()[0])
    environ = {"MEGATRON_BRIDGE": str(checkout)}
    run_folder = RunFolder.create(tmp_path / "install", config, datetime(2026, 1, 2, 3, 4, 5))
    spec = build_launch_spec(config, run_folder, "/py", environ)
    assert spec.command[:2] == ("python3", f"{checkout}/scripts/performance/run_script.py")
    assert (spec.folders, spec.mpi, spec.tasks) == ((str(checkout),), None, "gpu")
    (checkout / "scripts" / "performance" / "bootstrap.py").touch()
    assert build_launch_spec(config, run_folder, "/py", environ).command[1].endswith("/bootstrap.py")
    assert build_launch_spec(config, run_folder, "/py", {"MEGATRON_BRIDGE": "/opt/no such"}).folders == ()


def test_user_variables_override_those_of_the_engine(checkout: Path) -> None:
    gb200 = next(case for case in supported_rows() if case[1]["gpu"] == "gb200")
    environ = {"MEGATRON_BRIDGE": str(checkout), "NCCL_NET_GDR_LEVEL": "SYS", "PYTHONPATH": "/mine"}
    settings = engine_environment(bridge_config(*gb200), environ, {"HF_HUB_OFFLINE": "0"})
    assert (settings["HF_HUB_OFFLINE"], settings["NCCL_NET_GDR_C2C"]) == ("0", "1")
    assert "NCCL_NET_GDR_LEVEL" not in settings
    assert settings["PYTHONPATH"].split(":")[-3:] == ["/mine", f"{checkout}/scripts/performance", f"{checkout}/src"]


def test_hang_detector_ignores_an_engine_without_events() -> None:
    """It writes no events, and may run for hours."""
    now = [0.0]
    detector = HangDetector(bridge_config(*supported_rows()[0]), UnwatchedEngine(), clock=lambda: now[0])
    assert detector.verdict() is None
    now[0] = 7000.0
    assert detector.verdict() is None


class UnwatchedEngine:
    """Engine that must not be asked for hang reports."""

    def request_hang_reports(self, pids: Collection[int]) -> None:
        raise AssertionError("no hang")

    def cpu_time_s(self) -> float:
        return 0.0


@pytest.mark.slow
def test_log_becomes_the_result(checkout: Path, tmp_path: Path, monkeypatch) -> None:
    """Started by a real torchrun: two ranks with the arguments of eight."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    monkeypatch.setenv("MEGATRON_BRIDGE", str(checkout))
    h100 = next(row for row in RECIPES["pretrain_llama3.1"].rows if row["gpu"] == "h100" and row["size"] == "8b")
    config = bridge_config("pretrain_llama3.1", h100, nccl_trace="true", steps="50")
    config = replace(config, machine=replace(config.machine, gpus=2))
    run_folder = RunFolder.create(tmp_path / "install", config, datetime(2026, 1, 2, 3, 4, 5))
    command = engine_command(config, run_folder, "python")
    run_local(config, run_folder, command, {}, lambda event: None, 60)
    result = write_result(run_folder, config)
    assert (result.status, result.reason, result.engine) == ("ok", None, "megatron_bridge")
    assert result.step_time_s is not None
    assert result.tflops_source == "reported by the engine"
    for rank in (0, 1):
        arguments, offline = literal_eval((run_folder.path / f"calls.{rank}").read_text())
        assert (arguments, offline) == (megatron_bridge.arguments(config), "1")
    (row,) = result.collectives
    assert (row.operation, row.calls, row.bytes, row.ranks) == ("AllReduce", 1, 4096, 2)
