"""trtllm-bench: its script as golden text for every row, and as a process whose report becomes a Result."""

import shlex
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from llmb.cli.stored_runs import write_result
from llmb.config.overrides import Setting, parse_duration
from llmb.config.recipe import Row, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.launch.command import build_launch_spec, engine_command, engine_environment, format_engine_command
from llmb.launch.engines import trtllm
from llmb.launch.local import RunOutcome, run_local
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.job_script import SbatchOverrides, slurm_script
from llmb.results.result import Result

GOLDEN = Path(__file__).parent.parent / "golden"
RECIPES = load_all([shipped()])
R1 = RECIPES["inference_deepseek-r1"]


def trtllm_config(row: Row, **fields: str) -> RunConfig:
    picks = {"engine": "trtllm", "mode": row["mode"], "use_case": row["use_case"], **fields}
    settings = tuple(Setting(field=name, value=value, source="--set") for name, value in picks.items())
    return resolve(R1, RunRequest(size="671b", dtype=row["dtype"], gpus=row["gpus"], gpu=row["gpu"], settings=settings))


def name(row: Row) -> str:
    return f"{row['gpu']}_{row['mode']}_{row['use_case']}"


@pytest.mark.parametrize("row", R1.rows, ids=name)
def test_script_of_every_row_matches_the_golden_file(row: Row) -> None:
    assert trtllm.script(trtllm_config(row)) == (GOLDEN / "trtllm" / f"{name(row)}.sh").read_text()


@pytest.mark.parametrize("row", R1.rows, ids=name)
def test_launch_spec_has_one_task_per_gpu(row: Row, tmp_path: Path) -> None:
    config = trtllm_config(row, weights="/a folder/R1", dataset="/data/requests.jsonl")
    run_folder = RunFolder.create(tmp_path, config, datetime(2026, 1, 2, 3, 4, 5))
    spec = build_launch_spec(config, run_folder, "python")
    assert spec.command == ("trtllm-llmapi-launch", "bash", "trtllm.sh")  # no argument needs quoting
    assert (spec.mpi, spec.folders) == ("pmix", ("/a folder/R1", "/data"))
    assert spec.tasks_per_node(config.machine) * config.machine.nodes == row["gpus"]
    assert spec.tasks_per_node(config.machine) == (8 if row["gpu"] == "h100" else 4)
    spec.write_files(run_folder)
    assert (run_folder.path / "trtllm.sh").read_text() == trtllm.script(config)


def test_every_row_has_a_golden_file() -> None:
    assert sorted(path.stem for path in (GOLDEN / "trtllm").iterdir()) == sorted(map(name, R1.rows))
    assert len(R1.rows) == 16


@pytest.mark.parametrize("row", R1.rows, ids=name)
def test_sbatch_options_of_every_row(row: Row, tmp_path: Path) -> None:
    config = trtllm_config(row)
    run_folder = RunFolder.create(tmp_path, config, datetime(2026, 1, 2, 3, 4, 5))
    lines = slurm_script(config, run_folder, None, SbatchOverrides(), ["python"], {}).splitlines()
    per_node, nodes = (8, 2) if row["gpu"] == "h100" else (4, 1)
    expected = {f"--nodes={nodes}", f"--ntasks-per-node={per_node}", f"--job-name={config.name}"}
    assert {f"#SBATCH {option}" for option in expected} <= set(lines)
    (limit,) = (line.removeprefix("#SBATCH --time=") for line in lines if line.startswith("#SBATCH --time="))
    long = (row["mode"], row["use_case"]) == ("max_throughput", "generation")
    assert 0 < parse_duration(limit, "") - (6000 if long else 1800) < 600  # the row's limit and a margin


@pytest.mark.parametrize("row", R1.rows, ids=name)
def test_script_holds_every_cell_of_the_row(row: Row) -> None:
    """Independent of the golden files: every cell, looked up in the options of trtllm-bench."""
    config = trtllm_config(row, weights="/a folder/R1")
    words = shlex.split(trtllm.bench_line(config))
    flags = dict(pairwise(words))
    for cell in ("tp", "pp", "ep", "max_batch_size", "max_num_tokens", "concurrency", "num_requests"):
        assert int(flags[f"--{cell}"]) == row[cell]
    assert words[words.index("--model_path") + 1 :][:2] == ["/a folder/R1", "throughput"]
    assert "--streaming" in words
    options = yaml.safe_load(trtllm.options_text(config))
    assert options["enable_attention_dp"] == row["attention_dp"]
    assert options["enable_chunked_prefill"] == row.get("chunked_prefill", True)
    assert options["kv_cache_config"]["free_gpu_memory_fraction"] == row["kv_fraction"]
    assert options["kv_cache_config"]["dtype"] == "fp8"
    sizes = options["cuda_graph_config"]["batch_sizes"]
    assert sizes[-1] == row["max_batch_size"]
    assert all(size & (size - 1) == 0 for size in sizes[:-1])
    assert ("speculative_config" in options) == (row["mode"] == "min_latency")
    requests = shlex.split(trtllm.dataset_line(config))
    for flag, cell in (("--input-mean", "isl"), ("--output-mean", "osl"), ("--num-requests", "num_requests")):
        assert int(requests[requests.index(flag) + 1]) == row[cell]


def test_settings_reach_the_command() -> None:
    row = R1.rows[0]
    quiet = trtllm_config(
        row, streaming="false", dataset="/data/my requests.jsonl", cuda_graphs="false", warmup_requests="5"
    )
    line = trtllm.bench_line(quiet)
    assert "--streaming" not in line
    assert "--dataset '/data/my requests.jsonl'" in line
    assert "--warmup 5" in line
    assert "prepare-dataset" not in trtllm.script(quiet)
    assert "cuda_graph_config" not in trtllm.options_text(quiet)
    spread = trtllm_config(row, lengths="uniform", isl_spread="100", osl_spread="50")
    assert "token-unif-dist" in trtllm.dataset_line(spread)
    assert "--input-min 900 --input-max 1100 --output-min 950 --output-max 1050" in trtllm.dataset_line(spread)
    normal = trtllm_config(row, lengths="normal", isl_spread="100")
    assert "token-norm-dist" in trtllm.dataset_line(normal)
    assert "--input-stdev 100 --output-stdev 0" in trtllm.dataset_line(normal)


def test_profile_range_is_set_by_environment_variables() -> None:
    plain = trtllm_config(R1.rows[0])
    traced = trtllm_config(R1.rows[0], profile="true", profile_start="500", profile_stop="505")
    assert not [variable for variable in engine_environment(plain, {}, {}) if variable.startswith("TLLM_")]
    variables = engine_environment(traced, {}, {})
    assert variables["TLLM_PROFILE_START_STOP"] == "500-505"
    assert "TLLM_TORCH_PROFILE_TRACE" not in variables
    by_torch = replace(traced, profile=replace(traced.profile, profiler="torch"))
    assert engine_environment(by_torch, {}, {})["TLLM_TORCH_PROFILE_TRACE"] == "trace.json"


def test_check_refuses_what_cannot_be_started(monkeypatch, tmp_path: Path, bench) -> None:
    row = R1.rows[0]
    bench("true")
    with pytest.raises(ConfigError, match="WEIGHTS=FOLDER"):
        trtllm.check(trtllm_config(row))
    h100 = next(r for r in R1.rows if r["gpu"] == "h100")
    with pytest.raises(ConfigError, match="needs 2 nodes, this is one; use --on slurm"):
        trtllm.check(trtllm_config(h100, weights="/w"))
    trtllm.check(trtllm_config(h100, weights="/w"), local=False)
    trtllm.check(trtllm_config(row, weights="/w"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs trtllm-bench on the PATH"):
        trtllm.check(trtllm_config(row, weights="/w"))
    trtllm.check(trtllm_config(row, weights="/w"), local=False)
    assert format_engine_command(trtllm_config(row)) == trtllm.script(trtllm_config(row))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch):
    """Put a fake trtllm-bench on the PATH, which records its arguments and then runs `body`."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def put(body: str) -> None:
        program = tmp_path / "bin" / "trtllm-bench"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f'#!/usr/bin/env bash\nprintf "%s\\n" "$*" >> calls\n[[ $* == *prepare-dataset* ]] && exit 0\n{body}\n'
        )
        program.chmod(0o755)

    return put


def run_bench(tmp_path: Path, timeout_s: float = 20) -> tuple[RunOutcome, Result, RunFolder]:
    config = trtllm_config(R1.rows[0], weights="/weights of R1")
    assert isinstance(config.workload, Inference)
    run_folder = RunFolder.create(tmp_path / "install", config, datetime(2026, 1, 2, 3, 4, 5))
    run_folder.write_record(config, "L7")
    command = engine_command(config, run_folder, "python")
    outcome = run_local(config, run_folder, command, {}, lambda event: None, timeout_s, grace_s=1)
    return outcome, write_result(run_folder, config), run_folder


def test_report_becomes_the_result(tmp_path: Path, bench) -> None:
    bench(f"cat {shlex.quote(str(GOLDEN / 'logs' / 'trtllm.out'))}")
    _, result, run_folder = run_bench(tmp_path)
    assert (result.status, result.reason, result.engine) == ("ok", None, "trtllm")
    assert (result.output_tokens_per_s, result.requests) == (29431.2, 30720)
    assert result.ttft_ms is not None
    assert result.ttft_ms["mean"] == 8123.4471
    prepare_call, bench_call = (run_folder.path / "calls").read_text().splitlines()
    assert prepare_call.startswith("--model /weights of R1 prepare-dataset")
    assert "throughput --backend pytorch --tp 4" in bench_call
    assert yaml.safe_load((run_folder.path / "trtllm.yaml").read_text())["enable_attention_dp"] is True
    assert run_folder.log.name == f"{run_folder.name}_streaming-on_L7.out"
    assert "PERFORMANCE OVERVIEW" in run_folder.log.read_text()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("echo 'torch.OutOfMemoryError: CUDA out of memory. Tried'; exit 1", "oom", "CUDA out of memory"),
        ("echo nothing; exit 3", "failed", "exit code 3: nothing"),
        ("echo nothing", "failed", "recorded no end"),
        ("sleep 60", "timeout", "time limit of 2 s"),
    ],
)
def test_failure_has_a_status(tmp_path: Path, bench, body: str, status: str, message: str) -> None:
    bench(body)
    _, result, _ = run_bench(tmp_path, timeout_s=2 if "sleep" in body else 20)
    assert (result.status, result.output_tokens_per_s) == (status, None)
    assert message in (result.reason or "")


def test_published_reference_of_trtllm(tmp_path: Path) -> None:
    llama = RECIPES["inference_llama3.1"]
    settings = (Setting(field="engine", value="trtllm", source="--engine"),)
    config = resolve(llama, RunRequest(size="8b", dtype="fp8", gpus=1, gpu="h200", settings=settings))
    run_folder = RunFolder.create(tmp_path, config, datetime(2026, 1, 2, 3, 4, 5))
    run_folder.log.write_text((GOLDEN / "logs" / "trtllm.out").read_text())
    reference = write_result(run_folder, replace(config)).reference
    assert reference is not None
    assert (reference.metric, reference.value, reference.measured) == ("output_tokens_per_s", 17744, 29431.2)
