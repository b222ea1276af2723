"""Nsight Systems for ranks: which are wrapped, by which flags, and the paths of the reports, with a fake nsys."""

import shlex
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from llmb.config.spec import Inference, Machine, Profile, RunConfig
from llmb.errors import ConfigError
from llmb.launch.command import build_launch_spec, check_engine, engine_command, engine_environment
from llmb.launch.engines import nsys_command
from llmb.launch.run_folder import RunFolder

SLURM = {"SLURM_JOB_ID": "81", "SLURM_NODEID": "3", "SLURM_PROCID": "26", "SLURM_LOCALID": "2"}


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch) -> Path:
    """Put a fake nsys on the PATH, which records its arguments, creates its report and runs the command."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(
        "#!/usr/bin/env bash\n"
        'printf "%s\\n" "$@" > nsys.arguments\n'
        "while [[ $1 == profile || $1 == --* ]]; do\n"
        '  [[ $1 != --output=* ]] || touch "${1#--output=}.nsys-rep"\n'
        '  shift\ndone\nexec "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


@pytest.fixture
def on_gpus(config: RunConfig) -> RunConfig:
    return replace(config, machine=Machine(gpu="h100", gpus=32, gpus_per_node=8), profile=Profile(profile=True))


def reports(config: RunConfig, folder: Path, environ: dict[str, str], search_path: str) -> list[str]:
    """Run a rank's command in a folder of its own and list its reports."""
    folder.mkdir()
    command = nsys_command.wrap(["printf", "%s|", "two words", "$x"], config, "L7")
    process = subprocess.run(command, cwd=folder, env={"PATH": search_path, **environ}, check=True, capture_output=True)
    assert process.stdout == b"two words|$x|"  # the rank gets its arguments unchanged
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.nsys-rep"))


@pytest.fixture
def path(nsys: Path) -> str:
    return f"{nsys.parent}:/usr/bin:/bin"


def serving(config: RunConfig) -> RunConfig:
    work = Inference(
        mode="max_throughput", use_case="chat", isl=8, osl=8, max_batch_size=1, concurrency=1, max_num_tokens=8,
        kv_fraction=0.5, num_requests=1,
    )  # fmt: skip
    return replace(config, workload=work)


def test_report_names_match_the_recipe_documents(on_gpus, tmp_path, path):
    grok = replace(on_gpus, target="pretrain_grok1", size="314b")
    cases = {
        "pretrain_llama3.1": (on_gpus, "profile_81_3_2"),
        "pretrain_nemotronh": (replace(on_gpus, target="pretrain_nemotronh"), "profile_81_3_26"),
        "pretrain_grok1": (grok, "grok1-314b-bf16_32g_81_3_2"),
        "inference": (serving(on_gpus), "profile_81_26_2"),
    }
    for case, (config, name) in cases.items():
        assert reports(config, tmp_path / case, SLURM, path) == [f"nsys_profile/{name}.nsys-rep"]


def test_rank_variables_without_slurm(on_gpus, tmp_path, path):
    torchrun = {"GROUP_RANK": "0", "RANK": "5", "LOCAL_RANK": "5"}
    assert reports(on_gpus, tmp_path / "torchrun", torchrun, path) == ["nsys_profile/profile_L7_0_5.nsys-rep"]
    assert reports(on_gpus, tmp_path / "alone", {}, path) == ["nsys_profile/profile_L7_0_0.nsys-rep"]


def test_only_profiled_ranks_are_wrapped(on_gpus, tmp_path, path):
    two_ranks = replace(on_gpus, profile=Profile(profile=True, profile_ranks=(2, 26)))
    assert len(reports(two_ranks, tmp_path / "profiled", SLURM, path)) == 1
    assert reports(two_ranks, tmp_path / "other", SLURM | {"SLURM_PROCID": "6"}, path) == []


def test_capture_range_and_gpu_metrics_once_per_node(on_gpus, tmp_path, path):
    metrics = replace(on_gpus, profile=Profile(profile=True, gpu_metrics=True))
    reports(metrics, tmp_path / "third", SLURM, path)
    arguments = (tmp_path / "third" / "nsys.arguments").read_text().split("\n")
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--trace=cuda,nvtx"} < set(arguments)
    assert "--gpu-metrics-devices=all" not in arguments
    reports(metrics, tmp_path / "first", SLURM | {"SLURM_LOCALID": "0"}, path)
    assert "--gpu-metrics-devices=all" in (tmp_path / "first" / "nsys.arguments").read_text()
    reports(on_gpus, tmp_path / "without", SLURM | {"SLURM_LOCALID": "0"}, path)
    assert "--gpu-metrics-devices=all" not in (tmp_path / "without" / "nsys.arguments").read_text()


def test_job_id_is_quoted(on_gpus, tmp_path, path):
    command = nsys_command.wrap(["true"], on_gpus, "a'b $(touch hacked)")
    subprocess.run(command, cwd=tmp_path, env={"PATH": path}, check=True)
    assert not (tmp_path / "hacked").exists()
    assert (tmp_path / "nsys_profile" / "profile_a'b $(touch hacked)_0_0.nsys-rep").exists()


def test_every_engine_is_wrapped(on_gpus, run_folder, nsys, tmp_path):
    shell = tuple(nsys_command.wrap([], on_gpus, None))
    spec = build_launch_spec(on_gpus, run_folder, "/py")
    assert spec.command == (*shell, "/py", "-m", "llmb.train", "config.json")
    torchrun = ["/py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "--no-python"]
    one_node = replace(on_gpus, machine=Machine(gpu="h100", gpus=8, gpus_per_node=8))
    assert engine_command(one_node, run_folder, "/py") == [*torchrun, *shell, "/py", "-m", "llmb.train", "config.json"]
    one_gpu = replace(on_gpus, machine=Machine(gpu="h100", gpus=1, gpus_per_node=8))
    assert engine_command(one_gpu, run_folder, "/py") == [*shell, "/py", "-m", "llmb.train", "config.json"]
    assert engine_environment(on_gpus, {}, {})["LLMB_NSIGHT"] == "1"
    bench = replace(serving(on_gpus), engine="trtllm")
    tasks = build_launch_spec(bench, RunFolder.create(tmp_path, bench, datetime(2026, 1, 2)), "/py").command
    assert tasks[-3:] == ("trtllm-llmapi-launch", "bash", "trtllm.sh")
    assert nsys_command.PROGRAM in tasks[2]


def test_without_nsys_the_torch_profiler_is_used(on_gpus, config, run_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_launch_spec(on_gpus, run_folder, "/py").command == ("/py", "-m", "llmb.train", "config.json")
    assert "LLMB_NSIGHT" not in engine_environment(on_gpus, {}, {})
    forced = replace(on_gpus, profile=Profile(profile=True, profiler="nsight"))
    assert nsys_command.is_used(forced)  # in a container, which may have it
    with pytest.raises(ConfigError, match=r"needs nsys \(Nsight Systems\) on the PATH; or use --set profiler=torch"):
        check_engine(forced)
    with pytest.raises(ConfigError, match="GPU metrics need nsys"):
        check_engine(replace(on_gpus, profile=Profile(profile=True, gpu_metrics=True)))


def test_cpu_run_or_torch_profiler_is_not_wrapped(on_gpus, config, run_folder, nsys):
    on_cpu = replace(config, profile=Profile(profile=True))
    by_torch = replace(on_gpus, profile=Profile(profile=True, profiler="torch"))
    for plain in (on_cpu, by_torch, replace(on_gpus, profile=Profile())):
        assert not nsys_command.is_used(plain)
        assert "nsys" not in shlex.join(build_launch_spec(plain, run_folder, "/py").command)
    with pytest.raises(ConfigError, match="records a GPU, this run has none"):
        check_engine(replace(config, profile=Profile(profile=True, profiler="nsight")))
