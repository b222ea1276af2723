"""trtllm-bench: its script as text for every printed row, and as a process whose report becomes a Result."""

import shlex
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from llmb.cli.stored_runs import keep_result
from llmb.config.overrides import Setting, seconds
from llmb.config.recipe import Row, load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import Request
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.launch.command import engine_command, engine_environment, engine_order, spelled_command
from llmb.launch.engines import trtllm
from llmb.launch.local import Outcome, run_local
from llmb.launch.run_folder import RunDir
from llmb.launch.slurm.job_script import SlurmWishes, slurm_script
from llmb.results.result import Result

GOLDEN = Path(__file__).parent.parent / "golden"
RECIPES = load_all([shipped()])
R1 = RECIPES["inference_deepseek-r1"]


def composed(row: Row, **fields: str) -> RunConfig:
    picks = {"engine": "trtllm", "mode": row["mode"], "use_case": row["use_case"], **fields}
    wishes = tuple(Setting(field=name, value=value, source="--set") for name, value in picks.items())
    return resolve(R1, Request(size="671b", dtype=row["dtype"], gpus=row["gpus"], gpu=row["gpu"], settings=wishes))


def name(row: Row) -> str:
    return f"{row['gpu']}_{row['mode']}_{row['use_case']}"


@pytest.mark.parametrize("row", R1.rows, ids=name)
def test_the_script_of_a_printed_row_is_the_golden_text(row: Row) -> None:
    assert trtllm.script(composed(row)) == (GOLDEN / "trtllm" / f"{name(row)}.sh").read_text()


@pytest.mark.parametrize("row", R1.rows, ids=name)
def test_a_cluster_starts_a_task_for_each_gpu_and_the_first_runs_the_script(row: Row, tmp_path: Path) -> None:
    config = composed(row, weights="/a folder/R1", dataset="/data/requests.jsonl")
    rundir = RunDir.create(tmp_path, config, datetime(2026, 1, 2, 3, 4, 5))
    order = engine_order(config, rundir, "python")
    assert order.command == ("trtllm-llmapi-launch", "bash", "trtllm.sh")  # no word of it needs a quote
    assert (order.mpi, order.folders) == ("pmix", ("/a folder/R1", "/data"))
    assert order.tasks_per_node(config.machine) * config.machine.nodes == row["gpus"]
    assert order.tasks_per_node(config.machine) == (8 if row["gpu"] == "h100" else 4)
    order.lay_out(rundir)
    assert (rundir.path / "trtllm.sh").read_text() == trtllm.script(config)


def test_there_is_a_golden_text_for_each_printed_row_and_no_other() -> None:
    assert sorted(path.stem for path in (GOLDEN / "trtllm").iterdir()) == sorted(map(name, R1.rows))
    assert len(R1.rows) == 16


@pytest.mark.parametrize("row", R1.rows, ids=name)
def test_the_job_asks_for_the_machine_and_the_time_of_the_row(row: Row, tmp_path: Path) -> None:
    config = composed(row)
    rundir = RunDir.create(tmp_path, config, datetime(2026, 1, 2, 3, 4, 5))
    lines = slurm_script(config, rundir, None, SlurmWishes(), ["python"], {}).splitlines()
    per_node, nodes = (8, 2) if row["gpu"] == "h100" else (4, 1)
    asked = {f"--nodes={nodes}", f"--ntasks-per-node={per_node}", f"--job-name={config.name}"}
    assert {f"#SBATCH {option}" for option in asked} <= set(lines)
    (limit,) = (line.removeprefix("#SBATCH --time=") for line in lines if line.startswith("#SBATCH --time="))
    long = (row["mode"], row["use_case"]) == ("max_throughput", "generation")
    assert 0 < seconds(limit, "") - (6000 if long else 1800) < 600  # its own, and time to end


@pytest.mark.parametrize("row", R1.rows, ids=name)
def test_the_script_says_what_the_row_says(row: Row) -> None:
    """Independent of the golden texts: every printed cell, looked up where trtllm-bench takes it from."""
    config = composed(row, weights="/a folder/R1")
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
    quiet = composed(
        row, streaming="false", dataset="/data/my requests.jsonl", cuda_graphs="false", warmup_requests="5"
    )
    line = trtllm.bench_line(quiet)
    assert "--streaming" not in line
    assert "--dataset '/data/my requests.jsonl'" in line
    assert "--warmup 5" in line
    assert "prepare-dataset" not in trtllm.script(quiet)
    assert "cuda_graph_config" not in trtllm.options_text(quiet)
    spread = composed(row, lengths="uniform", isl_spread="100", osl_spread="50")
    assert "token-unif-dist" in trtllm.dataset_line(spread)
    assert "--input-min 900 --input-max 1100 --output-min 950 --output-max 1050" in trtllm.dataset_line(spread)
    normal = composed(row, lengths="normal", isl_spread="100")
    assert "token-norm-dist" in trtllm.dataset_line(normal)
    assert "--input-stdev 100 --output-stdev 0" in trtllm.dataset_line(normal)


def test_the_window_of_a_profile_is_told_by_variables() -> None:
    plain = composed(R1.rows[0])
    traced = composed(R1.rows[0], profile="true", profile_start="500", profile_stop="505")
    assert not [variable for variable in engine_environment(plain, {}, {}) if variable.startswith("TLLM_")]
    told = engine_environment(traced, {}, {})
    assert told["TLLM_PROFILE_START_STOP"] == "500-505"
    assert "TLLM_TORCH_PROFILE_TRACE" not in told
    by_torch = replace(traced, profile=replace(traced.profile, profiler="torch"))
    assert engine_environment(by_torch, {}, {})["TLLM_TORCH_PROFILE_TRACE"] == "trace.json"


def test_what_cannot_be_started_is_one_line(monkeypatch, tmp_path: Path, bench) -> None:
    row = R1.rows[0]
    bench("true")
    with pytest.raises(ConfigError, match="WEIGHTS=FOLDER"):
        trtllm.check(composed(row))
    h100 = next(r for r in R1.rows if r["gpu"] == "h100")
    with pytest.raises(ConfigError, match="needs 2 nodes, here is one; use --on slurm"):
        trtllm.check(composed(h100, weights="/w"))
    trtllm.check(composed(h100, weights="/w"), here=False)
    trtllm.check(composed(row, weights="/w"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs trtllm-bench on the PATH"):
        trtllm.check(composed(row, weights="/w"))
    trtllm.check(composed(row, weights="/w"), here=False)
    assert spelled_command(composed(row)) == trtllm.script(composed(row))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch):
    """A trtllm-bench on the PATH: a real program that notes its arguments, then does as it is told."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def put(does: str) -> None:
        program = tmp_path / "bin" / "trtllm-bench"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f'#!/usr/bin/env bash\nprintf "%s\\n" "$*" >> calls\n[[ $* == *prepare-dataset* ]] && exit 0\n{does}\n'
        )
        program.chmod(0o755)

    return put


def ran(tmp_path: Path, timeout_s: float = 20) -> tuple[Outcome, Result, RunDir]:
    config = composed(R1.rows[0], weights="/weights of R1")
    assert isinstance(config.workload, Inference)
    rundir = RunDir.create(tmp_path / "install", config, datetime(2026, 1, 2, 3, 4, 5))
    rundir.write_record(config, "L7")
    command = engine_command(config, rundir, "python")
    outcome = run_local(config, rundir, command, {}, lambda event: None, timeout_s, grace_s=1)
    return outcome, keep_result(rundir, config), rundir


def test_its_report_becomes_the_result(tmp_path: Path, bench) -> None:
    bench(f"cat {shlex.quote(str(GOLDEN / 'logs' / 'trtllm.out'))}")
    _, result, rundir = ran(tmp_path)
    assert (result.status, result.reason, result.engine) == ("ok", None, "trtllm")
    assert (result.output_tokens_per_s, result.requests) == (29431.2, 30720)
    assert result.ttft_ms is not None
    assert result.ttft_ms["mean"] == 8123.4471
    prepared, benched = (rundir.path / "calls").read_text().splitlines()
    assert prepared.startswith("--model /weights of R1 prepare-dataset")
    assert "throughput --backend pytorch --tp 4" in benched
    assert yaml.safe_load((rundir.path / "trtllm.yaml").read_text())["enable_attention_dp"] is True
    assert rundir.log.name == f"{rundir.name}_streaming-on_L7.out"
    assert "PERFORMANCE OVERVIEW" in rundir.log.read_text()


@pytest.mark.parametrize(
    ("does", "status", "said"),
    [
        ("echo 'torch.OutOfMemoryError: CUDA out of memory. Tried'; exit 1", "oom", "CUDA out of memory"),
        ("echo nothing; exit 3", "failed", "exit code 3: nothing"),
        ("echo nothing", "failed", "did not say how it ended"),
        ("sleep 60", "timeout", "time limit of 2 s"),
    ],
)
def test_however_it_ends_the_result_has_a_name_for_it(tmp_path: Path, bench, does: str, status: str, said: str) -> None:
    bench(does)
    _, result, _ = ran(tmp_path, timeout_s=2 if "sleep" in does else 20)
    assert (result.status, result.output_tokens_per_s) == (status, None)
    assert said in (result.reason or "")


def test_a_published_run_of_another_engine_is_compared_too(tmp_path: Path) -> None:
    llama = RECIPES["inference_llama3.1"]
    wishes = (Setting(field="engine", value="trtllm", source="--engine"),)
    config = resolve(llama, Request(size="8b", dtype="fp8", gpus=1, gpu="h200", settings=wishes))
    rundir = RunDir.create(tmp_path, config, datetime(2026, 1, 2, 3, 4, 5))
    rundir.log.write_text((GOLDEN / "logs" / "trtllm.out").read_text())
    found = keep_result(rundir, replace(config)).reference
    assert found is not None
    assert (found.metric, found.value, found.measured) == ("output_tokens_per_s", 17744, 29431.2)
