"""Every documented command line runs as printed (with --dry-run), in the folder that the document names, and resolves
to the documented row."""

import json
import shlex
import subprocess
from datetime import datetime

import pytest

from llmb.cli.install.recipe_folders import create_recipe_folders, repo_path
from llmb.config.recipe import shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.launch.run_folder import RunFolder

LLAMA, NEMOTRON, GROK, R1 = "pretrain_llama3.1", "pretrain_nemotronh", "pretrain_grok1", "inference_deepseek-r1"
SUBMIT_R1 = "llmb-run submit -w inference_deepseek-r1 -s 671b"
# Printed command line -> cells of the row it must resolve to.
LLMB_RUN = {
    "llmb-run single -w pretrain_llama3.1 -s 405b --dtype fp8 --scale 128": dict(gpu="gb200", tp=2, fsdp=True, dp=64, gbs=64, offload_layers=80),
    "llmb-run single -w pretrain_llama3.1 -s 70b --dtype fp8 --scale 64": dict(gpu="gb200", fsdp=True, dp=64, mbs=2, gbs=128, ga=1, offload_layers=40),
    "llmb-run single -w pretrain_llama3.1 -s 8b --dtype fp8 --scale 16": dict(gpu="gb200", fsdp=False, dp=16, mbs=2, gbs=256, ga=8),
    "llmb-run single -w pretrain_llama3.1 -s 405b --dtype fp8 --scale 128 -p": dict(profile=True, profile_start=45, profile_stop=50),
    "ENABLE_GPU_METRICS=true llmb-run single -w pretrain_llama3.1 -s 405b --dtype fp8 --scale 128 -p": dict(profile=True, gpu_metrics=True),
    "llmb-run single -w pretrain_nemotronh -s 56b --dtype fp8 --scale 256": dict(gpu="h100", tp=8, dp=32, gbs=768, ga=24),
    "llmb-run single -w pretrain_nemotronh -s 56b --dtype fp8 --scale 1024": dict(gpu="h100", tp=8, dp=128, gbs=3072, ga=24),
    "llmb-run single -w pretrain_grok1 -s 314b --dtype fp8 --scale 128": dict(gpu="gb200", tp=4, ep=8, etp=4, dp=32, gbs=256, ga=8),
    "llmb-run single -w pretrain_grok1 -s 314b --dtype bf16 --scale 256": dict(gpu="gb200", tp=4, ep=8, etp=4, dp=64, gbs=512, ga=8),
    'MODE="max_throughput" MAX_NUM_TOKENS=6000 MAX_BATCH_SIZE=768 USE_CASE=reasoning:1000/1000 ENABLE_CHUNKED_PREFILL=false ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4":
        dict(gpu="gb200", isl=1000, osl=1000, max_batch_size=768, concurrency=3072, max_num_tokens=6000, kv_fraction=0.85, num_requests=30720, tp=4, pp=1, ep=4, attention_dp=True, chunked_prefill=False),
    'MODE="max_throughput" MAX_NUM_TOKENS=16000 MAX_BATCH_SIZE=2884 KV_CACHE_FRACTION=0.5 ENABLE_CHUNKED_PREFILL=false USE_CASE=chat:128/128 ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4":
        dict(gpu="gb200", isl=128, osl=128, max_batch_size=2884, concurrency=11536, max_num_tokens=16000, kv_fraction=0.5, num_requests=115360, chunked_prefill=False),
    'MODE="max_throughput" MAX_NUM_TOKENS=9000 MAX_BATCH_SIZE=160 KV_CACHE_FRACTION=0.69 USE_CASE=summarization:8000/512 ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4":
        dict(gpu="gb200", isl=8000, osl=512, max_batch_size=160, concurrency=960, max_num_tokens=9000, kv_fraction=0.69, num_requests=9600, chunked_prefill=True),
    'MODE="max_throughput" SBATCH_TIMELIMIT=1:40:00 MAX_BATCH_SIZE=224 KV_CACHE_FRACTION=0.97 USE_CASE=generation:512/8000 ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4":
        dict(gpu="gb200", isl=512, osl=8000, max_batch_size=224, concurrency=896, max_num_tokens=2000, kv_fraction=0.97, num_requests=8960, time_limit_s=6000, chunked_prefill=True),
    'MODE="max_throughput" MAX_BATCH_SIZE=384 CONCURRENCY=3072 MAX_NUM_TOKENS=3000 NUM_REQUESTS=30720 USE_CASE=reasoning:1000/1000 ' + SUBMIT_R1 + " --dtype fp8 --scale 16":
        dict(gpu="h100", max_batch_size=384, concurrency=3072, max_num_tokens=3000, kv_fraction=0.65, num_requests=30720, tp=8, pp=2, ep=8, attention_dp=True),
    # The document's table prints other token budgets and request counts for the next two: see docs/references.md.
    'MODE="max_throughput"  MAX_BATCH_SIZE=384 CONCURRENCY=3072 MAX_NUM_TOKENS=2000 NUM_REQUESTS=3000 USE_CASE=chat:128/128 ' + SUBMIT_R1 + " --dtype fp8 --scale 16":
        dict(gpu="h100", isl=128, osl=128, max_batch_size=384, concurrency=3072, max_num_tokens=2000, num_requests=3000),
    'MODE="max_throughput" MAX_BATCH_SIZE=128 CONCURRENCY=1024 MAX_NUM_TOKENS=2000 NUM_REQUESTS=10000 USE_CASE=summarization:8000/512 ' + SUBMIT_R1 + " --dtype fp8 --scale 16":
        dict(gpu="h100", isl=8000, osl=512, max_batch_size=128, concurrency=1024, max_num_tokens=2000, num_requests=10000),
    'MODE="max_throughput" SBATCH_TIMELIMIT=1:40:00 MAX_BATCH_SIZE=450 CONCURRENCY=450 MAX_NUM_TOKENS=1000 NUM_REQUESTS=4500 USE_CASE=generation:512/8000 ' + SUBMIT_R1 + " --dtype fp8 --scale 16":
        dict(gpu="h100", isl=512, osl=8000, max_batch_size=450, concurrency=450, max_num_tokens=1000, num_requests=4500, time_limit_s=6000),
    'MODE="min_latency" MAX_NUM_TOKENS=1000 USE_CASE=reasoning:1000/1000 ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4":
        dict(gpu="gb200", max_batch_size=1, concurrency=1, max_num_tokens=1000, kv_fraction=0.1, num_requests=10, tp=4, ep=1, attention_dp=False),
    'MODE="min_latency" MAX_NUM_TOKENS=128 USE_CASE=chat:128/128 ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4": dict(max_batch_size=1, max_num_tokens=128, isl=128),
    'MODE="min_latency" MAX_NUM_TOKENS=8000 USE_CASE=summarization:8000/512 ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4": dict(max_batch_size=1, max_num_tokens=8000, osl=512),
    'MODE="min_latency" MAX_NUM_TOKENS=512 USE_CASE=generation:512/8000 ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4": dict(max_batch_size=1, max_num_tokens=512, osl=8000),
    "STREAMING=false USE_CASE=reasoning:1000/1000 " + SUBMIT_R1 + " --dtype nvfp4 --scale 4": dict(gpu="gb200", streaming=False, max_batch_size=768),
    "STREAMING=false USE_CASE=reasoning:1000/1000 " + SUBMIT_R1 + " --dtype fp8 --scale 16": dict(gpu="h100", streaming=False, max_batch_size=384),
    'ENABLE_PROFILE=true ENABLE_GPU_METRICS=true PROFILE_START=500 PROFILE_END=505 MODE="max_throughput" MAX_NUM_TOKENS=6000 MAX_BATCH_SIZE=768 USE_CASE=reasoning:1000/1000 ENABLE_CHUNKED_PREFILL=false ' + SUBMIT_R1 + " --dtype nvfp4 --scale 4":
        dict(profile=True, gpu_metrics=True, profile_start=500, profile_stop=505, max_batch_size=768),
}  # fmt: skip
LAUNCH_SH = {
    (LLAMA, "JOB_TOTAL_GPUS=128 GPU_TYPE=gb200 ./launch.sh"): dict(gpu="gb200", size="405b", gpus=128, tp=2, gbs=64),
    (LLAMA, "JOB_TOTAL_GPUS=256 GPU_TYPE=gb200 ./launch.sh"): dict(gpu="gb200", size="405b", gpus=256, tp=2, gbs=128),
    (LLAMA, "JOB_TOTAL_GPUS=1024 GPU_TYPE=h100 ./launch.sh"): dict(gpu="h100", size="405b", tp=8, pp=8, cp=2, vp=8, dp=8, gbs=512, ga=64),
    (LLAMA, "MODEL_SIZE=8b JOB_TOTAL_GPUS=8 GPU_TYPE=h100 ./launch.sh"): dict(gpu="h100", size="8b", fsdp=True, mbs=1, gbs=128, ga=16),
    (LLAMA, 'ADDITIONAL_SLURM_PARAMS="nodelist=node001,node002" JOB_TOTAL_GPUS=128 GPU_TYPE=gb200 ./launch.sh'): dict(slurm_params=["nodelist=node001,node002"]),
    (LLAMA, 'ADDITIONAL_SLURM_PARAMS="constraint=gpu&memory;exclusive" JOB_TOTAL_GPUS=256 GPU_TYPE=gb200 ./launch.sh'): dict(slurm_params=["constraint=gpu&memory", "exclusive"]),
    # 512 is not in the document's H100 table for 405b (1024 only): its own example needs --force.
    (LLAMA, 'ADDITIONAL_SLURM_PARAMS="reservation=my_reservation" JOB_TOTAL_GPUS=512 GPU_TYPE=h100 ./launch.sh --force'): dict(gpu="h100", tp=8, pp=8, cp=2, dp=4, gbs=256, ga=64),
    (NEMOTRON, "JOB_TOTAL_GPUS=256 ./launch.sh"): dict(gpu="h100", tp=8, gbs=768),
    (NEMOTRON, "JOB_TOTAL_GPUS=1024 ./launch.sh"): dict(gpu="h100", gbs=3072),
    (NEMOTRON, "ENABLE_PROFILE=true JOB_TOTAL_GPUS=256 ./launch.sh"): dict(profile=True, profile_start=46, profile_stop=50),
    (NEMOTRON, "ENABLE_NCCLTRACE=true JOB_TOTAL_GPUS=256 ./launch.sh"): dict(nccl_trace=True),
    (GROK, "JOB_TOTAL_GPUS=128 DTYPE=fp8 ./launch.sh"): dict(gpu="gb200", dtype="fp8", gbs=256),
    (GROK, "JOB_TOTAL_GPUS=256 DTYPE=bf16 ./launch.sh"): dict(gpu="gb200", dtype="bf16", gbs=512),
    (GROK, "ENABLE_PROFILE=true JOB_TOTAL_GPUS=256 DTYPE=fp8 ./launch.sh"): dict(profile=True, profile_start=45, profile_stop=50),
    (GROK, "ENABLE_NCCLTRACE=true JOB_TOTAL_GPUS=256 DTYPE=fp8 ./launch.sh"): dict(nccl_trace=True),
    # Printed with `sbatch -A ... -p ...` before it, to which GPU_TYPE=gb200 is the script and ./launch.sh its argument.
    (R1, "bash GPU_TYPE=gb200 ./launch.sh"): dict(gpu="gb200", gpus=4, dtype="nvfp4", max_batch_size=768),
    (R1, "bash GPU_TYPE=b200 ./launch.sh"): dict(gpu="b200", gpus=4, dtype="nvfp4", max_batch_size=786),
    (R1, "bash GPU_TYPE=h100 ./launch.sh"): dict(gpu="h100", gpus=16, dtype="fp8", max_batch_size=384),
}  # fmt: skip
FOLDER = {LLAMA: "llama3.1", NEMOTRON: "nemotronh", GROK: "grok1", R1: "deepseek_r1/inference/trtllm"}


def split(line):
    """Split a shell line into its variables and its arguments."""
    words = shlex.split(line)
    first = next(
        i for i, word in enumerate(words) if not word.split("=")[0].isupper() and "=" not in word.split("-")[0]
    )
    return dict(word.split("=", 1) for word in words[:first]), words[first:]


def cells(config):
    """Return the resolved configuration as one flat mapping."""
    flat = {"size": config["size"], **config["machine"], **config["parallel"], **config["precision"]}
    return {**flat, **config["workload"], **config["profile"], **config["limits"]}


def assert_cells(config, expected):
    actual = cells(config)
    assert {k: actual[k] for k in expected} == expected


@pytest.mark.parametrize("line", LLMB_RUN, ids=range(len(LLMB_RUN)))
def test_documented_llmb_run_line_resolves_to_its_row(line, llmb_run, monkeypatch):
    variables, words = split(line)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = llmb_run(*words[1:], "--dry-run", "--json")
    assert code == 0, err
    assert_cells(json.loads(out), LLMB_RUN[line])


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install folder as llmb-install leaves it; the environment of a shell in which a document's reader types."""
    install = tmp_path_factory.mktemp("llmb")
    assert create_recipe_folders(install) == []
    return install


def in_shell(line, folder, install, workload, **variables):
    """Run a line as typed, without llmb on the PATH."""
    programs = {
        "LLMB_INSTALL": install,
        "LLMB_REPO": repo_path(install),
        "LLMB_WORKLOAD": install / "workloads" / workload,
    }
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(install), **{k: str(v) for k, v in programs.items()}, **variables}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize(("workload", "line"), LAUNCH_SH, ids=range(len(LAUNCH_SH)))
def test_documented_launch_script_line_resolves_to_its_row(workload, line, installed):
    done = in_shell(f"{line} --dry-run --json", repo_path(installed) / FOLDER[workload], installed, workload)
    assert done.returncode == 0, done.stderr
    assert_cells(json.loads(done.stdout), LAUNCH_SH[workload, line])


@pytest.mark.parametrize(("gpu", "nodes"), [("gb200", 1), ("b200", 1), ("h100", 2)])
def test_script_that_sbatch_is_given_requests_its_nodes(installed, gpu, nodes):
    script = repo_path(installed) / FOLDER[R1] / f"GPU_TYPE={gpu}"
    assert f"\n#SBATCH --nodes={nodes}\n" in script.read_text()


def test_documented_timing_lines_read_what_runs_have_left(installed, recipes):
    """LLMB_WORKLOAD of the Grok-1 document is .../pretraining_grok1, its runs are of pretrain_grok1."""
    config = resolve(recipes[GROK], RunRequest(size="314b", dtype="bf16", gpus=1, proxy="small"))
    run = RunFolder.create(installed, config, datetime(2026, 1, 2))
    steps = [StepDone(step=n, seconds=0.5, tokens=100, time=float(n)) for n in range(1, 51)]
    for event in (RunStarted(time=0.0), *steps, RunEnded(time=60.0, status="ok")):
        append(run.events(0), event)
    run.log.touch()
    line = "common/parse_train_timing.sh $LLMB_WORKLOAD/experiments"
    done = in_shell(line, repo_path(installed), installed, "pretraining_grok1")
    assert done.returncode == 0, done.stderr
    assert "Success" in done.stdout
    line = "$LLMB_REPO/common/parse_train_timing_mbridge.sh --format=json"
    done = in_shell(line, installed / "workloads" / GROK, installed, GROK)
    assert done.returncode == 0, done.stderr
    assert [folder.path for folder in RunFolder.find_all(installed)] == [run.path]


def test_documented_setup_script_prepares_the_install_folder(installed):
    done = in_shell("./setup.sh --dry-run", repo_path(installed) / FOLDER[GROK], installed, GROK)
    assert done.returncode == 0, done.stderr
    assert f"LLMB_REPO={repo_path(installed)}" in done.stdout
    assert {"images", "venvs", "datasets", "workloads", "llmb_repo"} <= {path.name for path in installed.iterdir()}


def test_setup_script_without_llmb_and_without_an_environment_says_what_is_missing(installed):
    done = in_shell("./setup.sh", shipped() / GROK, installed, GROK)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ERROR: llmb-install is not on the PATH; activate the Python environment ")


def test_files_of_another_origin_stay(tmp_path):
    script = repo_path(tmp_path) / "grok1" / "launch.sh"
    script.parent.mkdir(parents=True)
    script.write_text("mine")
    assert create_recipe_folders(tmp_path) == [f"{script} is not ours and stays as it is"]
    assert create_recipe_folders(tmp_path) == [f"{script} is not ours and stays as it is"]
    assert script.read_text() == "mine"
    (repo_path(tmp_path) / ".git").mkdir()
    assert create_recipe_folders(tmp_path)[0].endswith("llmb_repo is a clone of another repository and stays as it is")


@pytest.mark.slow
def test_documented_out_of_core_line_resolves(llmb_run):
    line = "submit -w outofcore_llama3 -s 8b --seqlen 65536 --host-gb 178 --device-gb 78 --dry-run --json"
    code, out, err = llmb_run(*line.split())
    assert code == 0, err
    assert_cells(json.loads(out), {"seqlen": 65536, "host_gib": 178, "device_gib": 78, "gpu": "h100"})


@pytest.mark.parametrize("mode", ["max_throughput", "min_latency"])
@pytest.mark.parametrize(
    "case", ["reasoning:1000/1000", "chat:128/128", "summarization:8000/512", "generation:512/8000"]
)
@pytest.mark.parametrize(
    ("workload", "size"), [(R1, "671b"), ("inference_llama3.1", "8b"), ("inference_llama3.1", "70b")]
)
def test_every_use_case_runs_as_a_proxy_with_scaled_lengths(workload, size, case, mode, llmb_run, monkeypatch):
    monkeypatch.setenv("MODE", mode)
    name, _, lengths = case.partition(":")
    monkeypatch.setenv("USE_CASE", name)
    line = f"submit -w {workload} -s {size} --dtype fp8 --scale 1 --proxy --dry-run --json"
    code, out, err = llmb_run(*line.split())
    assert code == 0, err
    config = json.loads(out)
    work = config["workload"]
    assert f"lengths {work['isl']}/{work['osl']} instead of {lengths}" in config["proxy"]
    assert work["isl"] + work["osl"] <= 272
    assert work["num_requests"] >= 2 * work["concurrency"]
    concurrency = 16 if mode == "max_throughput" else 1
    assert config["name"].endswith(f"_{mode}_TP1_EP1_PP1_CON{concurrency}_{name}_proxy")


def test_documented_folder_name(llmb_run):
    _, out, _ = llmb_run(*f"{SUBMIT_R1} --dtype nvfp4 --scale 4 --dry-run --json".split()[1:])
    assert json.loads(out)["name"] == "DeepSeek-R1_max_throughput_TP4_EP4_PP1_CON3072_reasoning"


def test_external_engine_command_is_printed_and_refused_if_not_installed(llmb_run, monkeypatch):
    line = f"{SUBMIT_R1} --dtype nvfp4 --scale 4 --engine trtllm".split()[1:]
    monkeypatch.setenv("USE_CASE", "chat:128/128")
    code, out, err = llmb_run(*line, "--dry-run")
    assert (code, err) == (0, "")
    assert "\nexec trtllm-bench --model DeepSeek-R1 " in out
    assert "\nenable_attention_dp: true\n" in out
    code, out, err = llmb_run("show", *line[1:])
    assert (code, err) == (0, "")
    assert "trtllm-bench" in out
    code, out, err = llmb_run(*line)
    assert (code, out) == (1, "")
    assert err.startswith("ERROR: --engine trtllm needs trtllm-bench on the PATH")
    assert len(err.splitlines()) == 1


def test_run_whose_single_request_does_not_fit_is_refused_with_a_fraction_that_does(llmb_run, monkeypatch):
    monkeypatch.setattr("llmb.launch.local_machine.gpu_names", lambda: ["NVIDIA H200"])
    line = "submit -w inference_llama3.1 -s 8b --dtype fp8 --scale 1 --gpu-type h200 --set kv_fraction=0.01"
    code, out, err = llmb_run(*line.split(), "--set", "use_case=long:100000/2000")
    assert (code, out) == (1, "")
    assert "one request of 100000+2000 tokens needs 6.23 GiB of cache" in err
    assert "KV_CACHE_FRACTION=0.05 would do" in err
    assert len(err.splitlines()) == 1
