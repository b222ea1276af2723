"""Megatron-Bridge's script: its arguments as golden text for every row it covers, and as a process with a Result."""

import shlex
import sys
from ast import literal_eval
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from llmb.cli.stored_runs import keep_result
from llmb.config.overrides import Setting
from llmb.config.recipe import Row, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import Request
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.launch.command import check_engine, engine_command, engine_environment, engine_order, spelled_command
from llmb.launch.engines import megatron_bridge
from llmb.launch.hang_detector import StallWatch
from llmb.launch.local import run_local
from llmb.launch.run_folder import RunDir

GOLDEN = Path(__file__).parent.parent / "golden"
RECIPES = load_all([shipped()])
TRACED = (
    "node1:77:99 [0] NCCL INFO AllReduce: opCount 2 sendbuff 0x7ffb4713c200 recvbuff 0x7ffb4713c200 count 1024 "
    "datatype 7 op 0 root 0 comm 0x55556b100660 [nranks=2] stream 0x5555630c58b0\n"
)


def composed(target: str, row: Row, dtype: str = "fp8", gpus: int | None = None, **fields: str) -> RunConfig:
    picks = {"engine": "megatron_bridge", **fields}
    wishes = tuple(Setting(field=name, value=value, source="--set") for name, value in picks.items())
    gpus = gpus or int(str(row["gpus"]).split("-")[0])
    return resolve(RECIPES[target], Request(size=row["size"], dtype=dtype, gpus=gpus, gpu=row["gpu"], settings=wishes))


def covered() -> list[tuple[str, Row]]:
    """Every row of every recipe that Megatron-Bridge has, on a GPU that it knows."""
    rows = [(target, row) for target, recipe in RECIPES.items() for row in recipe.rows]
    return [
        (target, row)
        for target, row in rows
        if (target, row.get("size")) in megatron_bridge.RECIPES and row["gpu"] in megatron_bridge.GPUS
    ]


def name(case: tuple[str, Row]) -> str:
    target, row = case
    return f"{target}_{row['size']}_{row['gpu']}_{str(row['gpus']).split('-')[0]}"


@pytest.mark.parametrize("case", covered(), ids=name)
def test_the_arguments_of_a_row_are_the_golden_text(case: tuple[str, Row]) -> None:
    text = (GOLDEN / "megatron_bridge" / f"{name(case)}.txt").read_text()
    assert spelled_command(composed(*case), {"MEGATRON_BRIDGE": "/opt/Megatron-Bridge"}) == text


def test_there_is_a_golden_text_for_each_row_and_no_other() -> None:
    assert sorted(path.stem for path in (GOLDEN / "megatron_bridge").iterdir()) == sorted(map(name, covered()))
    assert {(target, row["size"]) for target, row in covered()} == set(megatron_bridge.RECIPES)
    assert len(covered()) == 14


@pytest.mark.parametrize("case", covered(), ids=name)
def test_the_arguments_say_what_the_row_says(case: tuple[str, Row]) -> None:
    """Independent of the golden texts: every printed cell, looked up where the script takes it from."""
    config, row = composed(*case), case[1]
    work = config.workload
    assert isinstance(work, Training)
    words = megatron_bridge.arguments(config)
    flags = dict(pairwise(words))
    for flag, cell in (("tensor_model", "tp"), ("pipeline_model", "pp"), ("context", "cp")):
        assert int(flags[f"--{flag}_parallel_size"]) == row[cell]
    assert flags["--virtual_pipeline_model_parallel_size"] == str(row["vp"])
    assert flags["--use_megatron_fsdp"] == str(row.get("fsdp", False)).lower()
    assert (int(flags["--micro_batch_size"]), int(flags["--seq_length"])) == (row["mbs"], row["seqlen"])
    assert int(flags["--global_batch_size"]) == work.mbs * work.ga * config.parallel.dp
    assert ("--recompute_num_layers" in flags) == bool(row.get("recompute_layers"))
    assert int(flags.get("--activation_offload_layers", 0)) == row.get("offload_layers", 0)
    assert ("--cuda_graph_impl" in flags) == (not row.get("cuda_graphs", False))
    assert flags["--compute_dtype"] == "fp8_cs"
    assert not [word for word in words if word.startswith("profiling.")]


def test_what_it_does_not_cover_is_one_line(tmp_path: Path) -> None:
    target, row = covered()[0]
    config = composed(target, row)
    with pytest.raises(ConfigError, match="MEGATRON_BRIDGE=FOLDER"):
        check_engine(config, {})
    with pytest.raises(ConfigError, match=r"holds no scripts/performance/run_script.py; is it a checkout"):
        check_engine(config, {"MEGATRON_BRIDGE": str(tmp_path)})
    with pytest.raises(ConfigError, match="give the whole path, /"):
        check_engine(config, {"MEGATRON_BRIDGE": "Megatron-Bridge"})
    check_engine(config, {"MEGATRON_BRIDGE": "/opt/Megatron-Bridge"}, here=False, in_container=True)
    h200 = next(row for row in RECIPES["pretrain_llama3.1"].rows if row["gpu"] == "h200" and row["size"] == "8b")
    with pytest.raises(ConfigError, match="does not run bf16 on h200; it runs bf16, fp8, nvfp4 on h100"):
        check_engine(composed("pretrain_llama3.1", h200, "bf16"), {})
    grok = RECIPES["pretrain_grok1"].rows[0]
    with pytest.raises(ConfigError, match=r"no recipe for pretrain_grok1 314b; it has pretrain_llama3\.1 405b"):
        check_engine(composed("pretrain_grok1", grok), {})


def test_profiling_and_dtypes_reach_the_script() -> None:
    h100 = next(row for row in RECIPES["pretrain_llama3.1"].rows if row["gpu"] == "h100" and row["gpus"] == 1)
    config = composed("pretrain_llama3.1", h100, "bf16", profile="true", profile_ranks="0")
    words = megatron_bridge.arguments(config)
    assert words[words.index("--compute_dtype") + 1] == "bf16"
    assert words[-4:] == [
        "profiling.use_nsys_profiler=true",
        "profiling.profile_step_start=45",
        "profiling.profile_step_end=50",
        "profiling.profile_ranks=[0]",
    ]
    by_torch = replace(config, profile=replace(config.profile, profiler="torch", profile_ranks=()))
    assert megatron_bridge.arguments(by_torch)[-4] == "profiling.use_pytorch_profiler=true"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose script notes its arguments and variables, then prints a log."""
    scripts = tmp_path / "Megatron Bridge" / "scripts" / "performance"
    scripts.mkdir(parents=True)
    log = GOLDEN / "logs" / "megatron_bridge.out"
    (scripts / "run_script.py").write_text(
        "import os, sys\n"
        "open(f\"calls.{os.environ['RANK']}\", 'w').write(repr((sys.argv[1:], os.environ['HF_HUB_OFFLINE'])))\n"
        f"print(open({str(log)!r}).read() + {TRACED!r}) if os.environ['RANK'] == '0' else None\n"
    )
    return scripts.parent.parent


def test_a_newer_checkout_is_entered_by_its_bootstrap(checkout: Path, tmp_path: Path) -> None:
    config = composed(*covered()[0])
    environ = {"MEGATRON_BRIDGE": str(checkout)}
    rundir = RunDir.create(tmp_path / "install", config, datetime(2026, 1, 2, 3, 4, 5))
    order = engine_order(config, rundir, "/py", environ)
    assert order.command[:2] == ("python3", f"{checkout}/scripts/performance/run_script.py")
    assert (order.folders, order.mpi, order.tasks) == ((str(checkout),), None, "gpu")
    (checkout / "scripts" / "performance" / "bootstrap.py").touch()
    assert engine_order(config, rundir, "/py", environ).command[1].endswith("/bootstrap.py")
    assert engine_order(config, rundir, "/py", {"MEGATRON_BRIDGE": "/opt/no such"}).folders == ()


def test_its_variables_do_not_go_over_the_users_head(checkout: Path) -> None:
    gb200 = next(case for case in covered() if case[1]["gpu"] == "gb200")
    environ = {"MEGATRON_BRIDGE": str(checkout), "NCCL_NET_GDR_LEVEL": "SYS", "PYTHONPATH": "/mine"}
    settings = engine_environment(composed(*gb200), environ, {"HF_HUB_OFFLINE": "0"})
    assert (settings["HF_HUB_OFFLINE"], settings["NCCL_NET_GDR_C2C"]) == ("0", "1")
    assert "NCCL_NET_GDR_LEVEL" not in settings
    assert settings["PYTHONPATH"].split(":")[-3:] == ["/mine", f"{checkout}/scripts/performance", f"{checkout}/src"]


def test_silence_is_no_sign_that_it_hangs() -> None:
    """It writes no events, and may run for hours."""
    now = [0.0]
    watch = StallWatch(composed(*covered()[0]), Unasked(), clock=lambda: now[0])
    assert watch.verdict() is None
    now[0] = 7000.0
    assert watch.verdict() is None


class Unasked:
    """An engine that must not be suspected."""

    def ask_where(self, pids: Collection[int]) -> None:
        raise AssertionError("nobody hangs")

    def worked_s(self) -> float:
        return 0.0


def test_its_log_becomes_the_result(checkout: Path, tmp_path: Path, monkeypatch) -> None:
    """Started here, by a real torchrun: two ranks with the arguments of eight."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    monkeypatch.setenv("MEGATRON_BRIDGE", str(checkout))
    h100 = next(row for row in RECIPES["pretrain_llama3.1"].rows if row["gpu"] == "h100" and row["size"] == "8b")
    config = composed("pretrain_llama3.1", h100, nccl_trace="true", steps="50")
    config = replace(config, machine=replace(config.machine, gpus=2))
    rundir = RunDir.create(tmp_path / "install", config, datetime(2026, 1, 2, 3, 4, 5))
    command = engine_command(config, rundir, "python")
    run_local(config, rundir, command, {}, lambda event: None, 60)
    result = keep_result(rundir, config)
    assert (result.status, result.reason, result.engine) == ("ok", None, "megatron_bridge")
    assert result.step_time_s is not None
    assert result.tflops_source == "reported by the engine"
    for rank in (0, 1):
        arguments, offline = literal_eval((rundir.path / f"calls.{rank}").read_text())
        assert (arguments, offline) == (megatron_bridge.arguments(config), "1")
    (row,) = result.collectives
    assert (row.operation, row.calls, row.bytes, row.ranks) == ("AllReduce", 1, 4096, 2)
