"""External engines on a real Slurm: their programs are fakes that record their calls and print a sample log, everything
between the command line and the Result is real.
"""

import json
import shlex
import sys
import time
from ast import literal_eval
from pathlib import Path

import pytest

import llmb

pytestmark = pytest.mark.slurm

LOGS = Path(__file__).parent.parent / "golden" / "logs"
TIMEOUT_S = 240.0
REAL_SRUN = "/usr/bin/srun"
NSYS = """
while [[ $1 == profile || $1 == --* ]]; do
  [[ $1 != --output=* ]] || touch "${1#--output=}.nsys-rep"
  shift
done
exec "$@"
"""
# Like the real one: the first task runs its arguments, split into words and without Slurm's variables.
LLMAPI_LAUNCH = """
touch "task.$SLURM_PROCID"
[[ $SLURM_PROCID == 0 ]] || exit 0
words="${@:1}"
unset "${!SLURM_@}"
$words
"""
BENCH = """
printf '%s\\n' "$*" >> calls
[[ $* == *prepare-dataset* ]] && exit 0
"""
# Without pyxis srun has no container options: they are recorded and removed.
SRUN_WITH_PYXIS = f"""
printf '%s\\n' "$@" > "$LLMB_INSTALL/srun.words"
words=()
for word; do [[ $word == --*container-* ]] || words+=("$word"); done
exec {REAL_SRUN} "${{words[@]}}"
"""
PERFORMANCE_SCRIPT = f"""
import os, sys
variables = {{name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}}
open(f"calls.{{os.environ['RANK']}}", "w").write(repr((sys.argv[1:], variables)))
if os.environ["RANK"] == "0":
    print(open({str(LOGS / "megatron_bridge.out")!r}).read())
    if os.environ.get("NCCL_DEBUG") == "INFO":
        print(open({str(LOGS / "nccl.log")!r}).read())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch):
    """Return a function that puts a program first on the PATH of this process, and so of the job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def write(name: str, text: str) -> None:
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{text}")
        path.chmod(0o755)

    write("python3", f'exec {shlex.quote(sys.executable)} "$@"\n')  # a link would lose its virtual environment
    return write


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch) -> Path:
    checkout = tmp_path / "Megatron Bridge"
    scripts = checkout / "scripts" / "performance"
    scripts.mkdir(parents=True)
    (scripts / "run_script.py").write_text(PERFORMANCE_SCRIPT)
    monkeypatch.setenv("MEGATRON_BRIDGE", str(checkout))
    return checkout


@pytest.fixture
def weights(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "weights of R1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("WEIGHTS", str(folder))
    return folder


@pytest.fixture
def run_to_end(llmb_run, tmp_path: Path):
    """Return a function that submits a run, waits for its result, and returns run folder and result."""

    def run(*arguments: str) -> tuple[Path, dict]:
        code, out, err = llmb_run("submit", *arguments, "--on", "slurm")
        assert (code, err) == (0, ""), out
        end = time.monotonic() + TIMEOUT_S
        while not (results := list((tmp_path / "llmb").glob("workloads/*/experiments/*/*/*/result.json"))):
            assert time.monotonic() < end, "no result"
            time.sleep(0.2)
        return results[0].parent, json.loads(results[0].read_text())

    return run


LLAMA = ("-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp8", "--gpu-type", "h100", "--engine", "megatron_bridge")
R1 = ("-w", "inference_deepseek-r1", "-s", "671b", "--dtype", "fp8", "--gpu-type", "h100", "--engine", "trtllm")


def job_id(run: Path) -> str:
    (record,) = run.glob("llmb-config_*.yaml")
    return record.stem.removeprefix("llmb-config_")


def test_megatron_bridge_on_two_nodes_with_nsight_on_each_rank(slurm, program, megatron, run_to_end):
    program("nsys", NSYS)
    run, result = run_to_end(*LLAMA, "--scale", "16", "-p")
    assert (result["status"], result["reason"], result["engine"]) == ("ok", None, "megatron_bridge")
    assert result["step_time_s"]["n"] == 10
    assert result["tflops_source"] == "reported by the engine"
    calls = [literal_eval((run / f"calls.{rank}").read_text()) for rank in range(16)]
    assert all(arguments == calls[0][0] for arguments, _ in calls)
    flags = calls[0][0]
    assert flags[flags.index("--num_gpus") + 1] == "16"
    assert "profiling.use_nsys_profiler=true" in flags
    first = calls[0][1]["MASTER_ADDR"]
    for rank, (_, variables) in enumerate(calls):
        local = str(rank % 8)
        expected = {"HF_HUB_OFFLINE": "1", "WORLD_SIZE": "16", "LOCAL_RANK": local, "MASTER_ADDR": first}
        assert variables == expected
    names = {f"profile_{job_id(run)}_{node}_{local}.nsys-rep" for node in (0, 1) for local in range(8)}
    assert {path.name for path in (run / "nsys_profile").iterdir()} == names


def test_nccl_trace_is_in_the_result_and_in_jobs_show(slurm, program, megatron, run_to_end, llmb_run):
    run, result = run_to_end(*LLAMA, "--scale", "8", "--set", "nccl_trace=true", "--set", "steps=50")
    assert result["status"] == "ok"
    calls = {(row["operation"], row["datatype"]): row["calls"] for row in result["collectives"]}
    assert sum(calls.values()) > 0
    assert {"AllReduce", "AllGather"} <= {operation for operation, _ in calls}
    code, out, _ = llmb_run("jobs", "show", job_id(run))
    assert code == 0
    assert "AllReduce" in out


def test_trtllm_on_two_nodes_in_a_container(slurm, program, weights, run_to_end, tmp_path, monkeypatch):
    image = tmp_path / "nvidia+trtllm+1.1.sqsh"
    image.touch()
    monkeypatch.setenv("RUN_CONF_IMAGE", str(image))
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmi2")  # this Slurm has no PMIx
    program("srun", SRUN_WITH_PYXIS)
    program("trtllm-llmapi-launch", LLMAPI_LAUNCH)
    program("trtllm-bench", f"{BENCH}cat {shlex.quote(str(LOGS / 'trtllm.out'))}\n")
    monkeypatch.setenv("USE_CASE", "reasoning:1000/1000")
    run, result = run_to_end(*R1, "--scale", "16")
    assert (result["status"], result["reason"], result["engine"]) == ("ok", None, "trtllm")
    assert (result["output_tokens_per_s"], result["requests"]) == (29431.2, 30720)
    assert {path.name for path in run.glob("task.*")} == {f"task.{rank}" for rank in range(16)}
    prepared, benched = (run / "calls").read_text().splitlines()
    assert prepared.startswith(f"--model {weights} prepare-dataset")
    assert "throughput --backend pytorch --tp 8 --ep 8 --pp 2" in benched
    (log,) = run.glob(f"{run.name}_streaming-on_{job_id(run)}.out")
    assert "PERFORMANCE OVERVIEW" in log.read_text()
    words = (tmp_path / "llmb" / "srun.words").read_text().splitlines()
    assert {f"--container-image={image}", "--no-container-mount-home", "--mpi=pmi2"} <= set(words)
    (mounts,) = (word for word in words if word.startswith("--container-mounts="))
    assert f"{weights}:{weights}" in mounts
    assert f"{tmp_path / 'llmb'}:{tmp_path / 'llmb'}" in mounts
    assert f"--container-workdir={run}" in words


def test_engine_failure_is_diagnosed(slurm, program, weights, run_to_end, monkeypatch):
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmi2")
    program("trtllm-llmapi-launch", LLMAPI_LAUNCH)
    program("trtllm-bench", f"{BENCH}echo 'torch.OutOfMemoryError: CUDA out of memory. Tried'; exit 1\n")
    _, result = run_to_end(*R1, "--scale", "16")
    assert result["status"] == "oom"
    assert "CUDA out of memory" in result["reason"]
    assert result["output_tokens_per_s"] is None


@pytest.mark.nightly
def test_native_engine_runs_with_the_python_of_its_container(slurm, program, run_to_end, tmp_path, monkeypatch):
    image = tmp_path / "torch.sqsh"
    image.touch()
    monkeypatch.setenv("RUN_CONF_IMAGE", str(image))
    program("srun", SRUN_WITH_PYXIS)
    line = ("-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "1", "--proxy")
    _, result = run_to_end(*line, "--set", "steps=3")
    assert (result["status"], result["reason"], result["engine"]) == ("ok", None, "native")
    words = (tmp_path / "llmb" / "srun.words").read_text().splitlines()
    assert words[-4:] == ["python3", "-m", "llmb.train", "config.json"]
    (mounts,) = (word for word in words if word.startswith("--container-mounts="))
    source = Path(llmb.__file__).parent.parent
    assert f"{source}:{source}" in mounts


def test_missing_image_is_reported_before_submission(slurm, weights, llmb_run, monkeypatch, tmp_path):
    monkeypatch.setenv("RUN_CONF_IMAGE", str(tmp_path / "no.sqsh"))
    code, _, err = llmb_run("submit", *R1, "--scale", "16", "--on", "slurm")
    assert code == 1
    assert f"container image {tmp_path / 'no.sqsh'} is missing" in err
    assert not (tmp_path / "llmb" / "workloads").exists()
