"""Nsight Systems around ranks: who is wrapped, by which flags, where the reports lie. nsys is a small program here."""

import shlex
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from llmb.config.spec import Inference, Machine, Profile, RunConfig
from llmb.errors import ConfigError
from llmb.launch.command import check_engine, engine_command, engine_environment, engine_order
from llmb.launch.engines import nsys_command
from llmb.launch.run_folder import RunDir

SLURM = {"SLURM_JOB_ID": "81", "SLURM_NODEID": "3", "SLURM_PROCID": "26", "SLURM_LOCALID": "2"}


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch) -> Path:
    """On the PATH, as on a GPU machine: notes its own words, makes its report, runs what it is given."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(
        "#!/usr/bin/env bash\n"
        'printf "%s\\n" "$@" > nsys.words\n'
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


def reports(config: RunConfig, folder: Path, environ: dict[str, str], path: str) -> list[str]:
    """Run a rank's command in a folder of its own and list what it leaves."""
    folder.mkdir()
    command = nsys_command.wrapped(["printf", "%s|", "two words", "$x"], config, "L7")
    said = subprocess.run(command, cwd=folder, env={"PATH": path, **environ}, check=True, capture_output=True)
    assert said.stdout == b"two words|$x|"  # whatever happens, the rank gets its words as they are
    return sorted(str(found.relative_to(folder)) for found in folder.rglob("*.nsys-rep"))


@pytest.fixture
def path(nsys: Path) -> str:
    return f"{nsys.parent}:/usr/bin:/bin"


def serving(config: RunConfig) -> RunConfig:
    work = Inference(
        mode="max_throughput", use_case="chat", isl=8, osl=8, max_batch_size=1, concurrency=1, max_num_tokens=8,
        kv_fraction=0.5, num_requests=1,
    )  # fmt: skip
    return replace(config, workload=work)


def test_reports_have_the_names_of_the_documents(on_gpus, tmp_path, path):
    grok = replace(on_gpus, target="pretrain_grok1", size="314b")
    cases = {
        "pretrain_llama3.1": (on_gpus, "profile_81_3_2"),
        "pretrain_nemotronh": (replace(on_gpus, target="pretrain_nemotronh"), "profile_81_3_26"),
        "pretrain_grok1": (grok, "grok1-314b-bf16_32g_81_3_2"),
        "inference": (serving(on_gpus), "profile_81_26_2"),
    }
    for case, (config, name) in cases.items():
        assert reports(config, tmp_path / case, SLURM, path) == [f"nsys_profile/{name}.nsys-rep"]


def test_without_slurm_the_place_is_torchruns_or_the_only_one(on_gpus, tmp_path, path):
    torchrun = {"GROUP_RANK": "0", "RANK": "5", "LOCAL_RANK": "5"}
    assert reports(on_gpus, tmp_path / "torchrun", torchrun, path) == ["nsys_profile/profile_L7_0_5.nsys-rep"]
    assert reports(on_gpus, tmp_path / "alone", {}, path) == ["nsys_profile/profile_L7_0_0.nsys-rep"]


def test_only_the_asked_ranks_are_wrapped(on_gpus, tmp_path, path):
    some = replace(on_gpus, profile=Profile(profile=True, profile_ranks=(2, 26)))
    assert len(reports(some, tmp_path / "asked", SLURM, path)) == 1
    assert reports(some, tmp_path / "other", SLURM | {"SLURM_PROCID": "6"}, path) == []


def test_the_window_is_the_engines_and_gpu_metrics_are_read_once_a_node(on_gpus, tmp_path, path):
    metrics = replace(on_gpus, profile=Profile(profile=True, gpu_metrics=True))
    reports(metrics, tmp_path / "third", SLURM, path)
    words = (tmp_path / "third" / "nsys.words").read_text().split("\n")
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--trace=cuda,nvtx"} < set(words)
    assert "--gpu-metrics-devices=all" not in words
    reports(metrics, tmp_path / "first", SLURM | {"SLURM_LOCALID": "0"}, path)
    assert "--gpu-metrics-devices=all" in (tmp_path / "first" / "nsys.words").read_text()
    reports(on_gpus, tmp_path / "without", SLURM | {"SLURM_LOCALID": "0"}, path)
    assert "--gpu-metrics-devices=all" not in (tmp_path / "without" / "nsys.words").read_text()


def test_a_hostile_job_id_stays_a_word(on_gpus, tmp_path, path):
    command = nsys_command.wrapped(["true"], on_gpus, "a'b $(touch hacked)")
    subprocess.run(command, cwd=tmp_path, env={"PATH": path}, check=True)
    assert not (tmp_path / "hacked").exists()
    assert (tmp_path / "nsys_profile" / "profile_a'b $(touch hacked)_0_0.nsys-rep").exists()


def test_every_engine_is_wrapped_in_its_own_place(on_gpus, rundir, nsys, tmp_path):
    shell = tuple(nsys_command.wrapped([], on_gpus, None))
    order = engine_order(on_gpus, rundir, "/py")
    assert order.command == (*shell, "/py", "-m", "llmb.train", "config.json")
    torchrun = ["/py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "--no-python"]
    one_node = replace(on_gpus, machine=Machine(gpu="h100", gpus=8, gpus_per_node=8))
    assert engine_command(one_node, rundir, "/py") == [*torchrun, *shell, "/py", "-m", "llmb.train", "config.json"]
    alone = replace(on_gpus, machine=Machine(gpu="h100", gpus=1, gpus_per_node=8))
    assert engine_command(alone, rundir, "/py") == [*shell, "/py", "-m", "llmb.train", "config.json"]
    assert engine_environment(on_gpus, {}, {})["LLMB_NSIGHT"] == "1"
    bench = replace(serving(on_gpus), engine="trtllm")
    tasks = engine_order(bench, RunDir.create(tmp_path, bench, datetime(2026, 1, 2)), "/py").command
    assert tasks[-3:] == ("trtllm-llmapi-launch", "bash", "trtllm.sh")
    assert nsys_command.PROGRAM in tasks[2]


def test_where_it_is_not_there_torch_traces(on_gpus, config, rundir, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engine_order(on_gpus, rundir, "/py").command == ("/py", "-m", "llmb.train", "config.json")
    assert "LLMB_NSIGHT" not in engine_environment(on_gpus, {}, {})
    forced = replace(on_gpus, profile=Profile(profile=True, profiler="nsight"))
    assert nsys_command.used(forced)  # in a container, which may have it
    with pytest.raises(ConfigError, match=r"needs nsys \(Nsight Systems\) on the PATH; or use --set profiler=torch"):
        check_engine(forced)
    with pytest.raises(ConfigError, match="GPU metrics need nsys"):
        check_engine(replace(on_gpus, profile=Profile(profile=True, gpu_metrics=True)))


def test_a_run_without_a_gpu_or_with_torchs_profiler_is_not_wrapped(on_gpus, config, rundir, nsys):
    on_cpu = replace(config, profile=Profile(profile=True))
    by_torch = replace(on_gpus, profile=Profile(profile=True, profiler="torch"))
    for plain in (on_cpu, by_torch, replace(on_gpus, profile=Profile())):
        assert not nsys_command.used(plain)
        assert "nsys" not in shlex.join(engine_order(plain, rundir, "/py").command)
    with pytest.raises(ConfigError, match="records a GPU, this run has none"):
        check_engine(replace(config, profile=Profile(profile=True, profiler="nsight")))
