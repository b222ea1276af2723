"""Fuzz campaigns over every file that llmb reads: a mutated one is read or refused in one line.

`make test` runs 20,000 cases in process, `make test-all` a million; a failure prints the seed of its case:

    FUZZ_SEED=1234 pytest tests/test_fuzz_inputs.py -k recipe        # that case alone
"""

import json
import os
import random
import shutil
import signal
import struct
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from dense_cases import DENSE_CASES
from fuzzed_files import damaged_bytes, mutated_json, mutated_lines, mutated_value
from published_models import DEEPSEEK, GPT_OSS_20B, LLAMA_8B, MIXTRAL, QWEN3_30B

from llmb.cli.stored_runs import load_run
from llmb.config.bulk_file import read_bulk
from llmb.config.faults.fault_file import read_faults, with_faults
from llmb.config.faults.fault_plan import Fault, FaultInjection
from llmb.config.huggingface.hf_config import load_hf_config, to_hf_config
from llmb.config.load_settings import config_from_json
from llmb.config.overrides import Setting
from llmb.config.recipe import load, load_all, shipped
from llmb.config.resolve import resolve, resolve_all
from llmb.config.row_selection import RunRequest
from llmb.config.run_list import RunSelection, tasks_for
from llmb.config.serialization import build, read_json, to_json, to_plain
from llmb.errors import LlmbError
from llmb.events import RunEnded, StepDone, append, read
from llmb.formats.token_file import TokenWriter, read_header
from llmb.formats.weight_folder import check_folder
from llmb.launch.archive.pack import write_archive
from llmb.launch.archive.unpack import read_archive
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.cluster_config import read_cluster
from llmb.loadgen.client.openai_stream import ResponseReader
from llmb.loadgen.dataset_file import read_dataset_file
from llmb.loadgen.prompt_text import TextWriter
from llmb.loadgen.traces import read_trace
from llmb.report.summary import summary
from llmb.results.compare.baseline import Baseline, check_comparable, judge, read_baseline
from llmb.results.compare.median_interval import MedianInterval
from llmb.results.derive import derive
from llmb.results.job_store import Store
from llmb.results.result import Result

SECONDS = 60  # of one case: it takes milliseconds, even on a busy machine less than a second
RECIPES = load_all([shipped()])
UNDISTURBED = resolve(
    RECIPES["pretrain_llama3.1"],
    RunRequest(
        size="8b", dtype="fp32", gpus=1, proxy="small",
        settings=(Setting(field="checkpoint_every", value=4, source="--set"),),
    ),
)  # fmt: skip
FAULTS = [
    {"kind": "slow_rank", "step": 2, "slow_s": 0.5, "slow_steps": 2},
    {"kind": "rank_killed", "step": 7, "rank": 0},
    {"kind": "disk_full", "step": 8},
]
PLAN = FaultInjection(faults=tuple(build(Fault, fault) for fault in FAULTS), source="faults.yaml")
CONFIG = with_faults(UNDISTURBED, PLAN)
EVENTS = [
    {"event": "RunLaunched", "time": 0.5, "start": 0, "step": 0},
    {"event": "FaultInjected", "time": 2.5, "rank": 0, "fault": 0, "kind": "slow_rank", "step": 2},
    {"event": "StepDone", "time": 1.5, "step": 1, "seconds": 0.5, "tokens": 512, "loss": 9.0},
    {"event": "FaultInjected", "time": 2.7, "rank": 0, "fault": 1, "kind": "rank_killed", "step": 7},
    {"event": "RunEnded", "time": 3.0, "status": "failed", "reason": "killed"},
    {"event": "RunLaunched", "time": 3.1, "start": 1, "step": 4, "checkpoint": "step_4"},
    {"event": "RunResumed", "time": 3.2, "step": 0, "checkpoint": "step_4"},
    {"event": "RunStarted", "time": 1.0, "world_size": 1, "gpu_name": "cpu", "host": "n1", "versions": {"torch": "2"}},
    *({"event": "StepDone", "time": 1.0 + n, "step": n, "seconds": 0.5, "tokens": 512, "loss": 9.0 / n,
       "grad_norm": 1.0, "memory_bytes": 10**9, "warmup": n < 3} for n in range(1, 13)),
    {"event": "ServingSummary", "values": {"output_tokens_per_s": 5.0}},
    {"event": "RequestDone", "request": 1, "arrival": 0.0, "first_token": 0.5, "token_times": [0.5, 0.6], "end": 0.6,
     "input_tokens": 10, "output_tokens": 2},
    {"event": "RunEnded", "status": "ok", "rank": 0, "last_lines": ["done"]},
]  # fmt: skip
BULK = {
    "pretrain_llama3.1_8b": {"dtypes": ["bf16", "fp8"], "scales": [1, 8], "repeats": 2, "tasks": [
        {"overrides": {"params": {"tp": [1, 2], "mbs": 1}, "env": {"NCCL_DEBUG": "INFO"}}},
        {"proxy": True, "scales": 1}]},
    "pretrain_grok1": {"dtypes": "fp8", "scales": 512, "add_profile": True},
}  # fmt: skip
CLUSTER = {
    "schema_version": 2, "cluster_name": "eos", "gpu_type": "h100", "install": {"node_architecture": "x86_64"},
    "environment": {"HF_HOME": "/x", "SBATCH_QOS": "high", "ADDITIONAL_SLURM_PARAMS": "exclusive;qos=high"},
    "slurm": {"common": {"account": "a", "time": "1:00:00"}, "gpu": {"partition": "p", "gres": "gpu:h100:8"}},
    "workloads": {"installed": ["w"], "config": {
        "pretrain_grok1": {"slurm": {"mem": 0}, "container_mounts": ["/a:/b"]}}},
    "container": {"image": "x.sqsh", "mounts": ["/a:/a"]},
}  # fmt: skip
AZURE_TRACE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE_TRACE = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]},
]
DATASET = [
    {"prompt": "Once upon", "output_tokens": 12}, {"input_ids": [17, 4], "output_tokens": 3},
    {"messages": [{"role": "user", "content": "Why?"}], "output_tokens": 2},
]  # fmt: skip
SHARE_GPT = [{"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}]
CHUNKS = [
    {"choices": [{"text": "a", "finish_reason": None}]},
    {"choices": [{"delta": {"content": "b", "tool_calls": [{"function": {"name": "x"}}]}, "finish_reason": "length"}]},
    {"usage": {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}},
    {"error": {"message": "overloaded"}},
]
HF_CONFIGS = [to_hf_config(model) for model in (LLAMA_8B, DEEPSEEK, MIXTRAL, QWEN3_30B, GPT_OSS_20B, *DENSE_CASES)]
BASELINE = Baseline(
    name="run", gpu_name="cpu", gpus=1, commit=None, samples_sha256="", settings={"model.layers": 2},
    times={"ttft_ms": MedianInterval(median=5.0, low=4.0, high=6.0, n=40, block=2, blocks=20)},
)  # fmt: skip


class Inputs:
    """One method per kind of file: writes a mutated one and reads it as the commands do."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run = RunFolder.create(folder, CONFIG, datetime(2026, 1, 1))
        append(self.run.events(0), StepDone(step=1, seconds=1.0, tokens=5))
        append(self.run.events(0), RunEnded(status="ok"))
        self.result = to_plain(derive(CONFIG, [StepDone(step=n, seconds=0.5, tokens=512) for n in range(1, 41)]))
        self.result = json.loads(to_json(self.result))
        self.plain_config = json.loads(to_json(CONFIG))
        self.recipe_texts = {name: yaml.safe_load((shipped() / name / "recipe.yaml").read_text()) for name in RECIPES}
        self.recipe_bytes = {name: (shipped() / name / "recipe.yaml").read_bytes() for name in RECIPES}
        with Store(folder / "jobs.sqlite3") as store:
            for _ in range(40):
                store.add(CONFIG, self.run.path)
        self.store = (folder / "jobs.sqlite3").read_bytes()
        write_archive([self.run], folder / "runs.tar.zst", {})
        self.packed = (folder / "runs.tar.zst").read_bytes()
        with TokenWriter(folder / "tokens.bin", vocab=4096, end=0) as tokens:
            tokens.add([1, 2, 3, 4000])
        self.tokens = (folder / "tokens.bin").read_bytes()

    def write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def recipe(self, chance: random.Random) -> None:
        name = chance.choices(list(RECIPES), [0.1 if RECIPES[n].kind == "outofcore" else 1 for n in RECIPES])[0]
        if chance.random() < 0.2:  # the C parser may give up anywhere
            content = damaged_bytes(self.recipe_bytes[name], chance)
        else:
            data = dict(self.recipe_texts[name])
            data["rows"] = chance.sample(data["rows"], min(3, len(data["rows"])))
            content = json.dumps(mutated_value(data, chance)).encode()
        recipe = load(self.write("recipe.yaml", content))
        proxy = chance.choice(["small", None])
        request = RunSelection(proxy=proxy, targets=(recipe.workload,), exact_scales=True)
        tasks = tasks_for(request, {recipe.workload: recipe})
        if recipe.kind != "outofcore":  # whose plan takes a second
            resolve(recipe, chance.choice(tasks).request)

    def bulk(self, chance: random.Random) -> None:
        if chance.random() < 0.3:
            text = b"pretrain_llama3.1_8b:\n('bf16', [1, 8], 3)\n('fp8', [8], 1, True) # comment\n"
            path = self.write("runs.txt", damaged_bytes(text, chance))
        else:
            path = self.write("runs.yaml", mutated_json(BULK, chance))
        tasks = read_bulk(path, RECIPES, RunSelection())
        resolve_all(tasks[:1], RECIPES, self.folder)

    def cluster(self, chance: random.Random) -> None:
        cluster = read_cluster(self.write("cluster_config.yaml", mutated_json(CLUSTER, chance)))
        cluster.for_target("pretrain_grok1_314b")

    def config(self, chance: random.Random) -> None:
        path = self.write("config.json", mutated_json(self.plain_config, chance))
        config = config_from_json(read_json(path), "config.json")
        summary(derive(config, [StepDone(step=1, seconds=0.5, tokens=5), RunEnded(status="ok")]))

    def faults(self, chance: random.Random) -> None:
        plan = read_faults(self.write("faults.yaml", mutated_json(FAULTS, chance)))
        summary(derive(with_faults(UNDISTURBED, plan), [StepDone(step=1, seconds=0.5), RunEnded(status="ok")]))

    def events(self, chance: random.Random) -> None:
        events = [event for event in EVENTS if chance.random() < 0.9]
        lines = [mutated_json(e, chance) if chance.random() < 0.4 else json.dumps(e).encode() for e in events]
        path = self.write("events.rank0.jsonl", b"\n".join(lines))
        derived = derive(CONFIG, read(path))
        summary(build(Result, json.loads(to_json(derived)), "result.json"))

    def result_file(self, chance: random.Random) -> None:
        self.run.result.write_bytes(mutated_json(self.result, chance))
        _, result = load_run(self.run)
        summary(result)

    def job_store(self, chance: random.Random) -> None:
        content = bytearray(self.store)
        for _ in range(chance.randrange(1, 30)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        if chance.random() < 0.2:
            del content[chance.randrange(len(content)) :]
        with Store(self.write("damaged.sqlite3", bytes(content))) as store:
            jobs = store.jobs(5)
            store.note(jobs[0].job_id, status="lost")
            store.job("L1")

    def archive(self, chance: random.Random) -> None:
        read_archive(self.write("damaged.tar.zst", damaged_bytes(self.packed, chance)), None)

    def token_file(self, chance: random.Random) -> None:
        read_header(self.write("damaged.bin", damaged_bytes(self.tokens, chance)))

    def weights(self, chance: random.Random) -> None:
        folder = self.folder / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        header = {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {"format": "pt"}}
        text = mutated_json(header, chance)
        shard = struct.pack("<Q", len(text)) + text + bytes(12)
        name = chance.choice(["model.safetensors", "model-1-of-2.safetensors", "model-1-of-99999999999.safetensors"])
        (folder / name).write_bytes(damaged_bytes(shard, chance) if chance.random() < 0.3 else shard)
        if chance.random() < 0.1:
            os.mkfifo(folder / "model-2-of-2.safetensors")
        index = {"weight_map": {"a": name}, "metadata": {"total_size": 12}}
        (folder / "model.safetensors.index.json").write_bytes(mutated_json(index, chance))
        check_folder(folder)

    def trace(self, chance: random.Random) -> None:
        content = damaged_bytes(AZURE_TRACE, chance) if chance.random() < 0.3 else mutated_lines(MOONCAKE_TRACE, chance)
        read_trace(self.write("trace", content), 2.0)

    def dataset(self, chance: random.Random) -> None:
        content = mutated_json(SHARE_GPT, chance) if chance.random() < 0.3 else mutated_lines(DATASET, chance)
        read_dataset_file(self.write("dataset", content), TextWriter(), 5)

    def hf_config(self, chance: random.Random) -> None:
        load_hf_config(self.write("config.json", mutated_json(chance.choice(HF_CONFIGS), chance)))

    def server_stream(self, chance: random.Random) -> None:
        events = mutated_lines(CHUNKS, chance).split(b"\n")
        reader = ResponseReader(keep_text=chance.random() < 0.5)
        reader.events(events, 1.0)
        reader.block(b"\n\n".join(b"data: " + event for event in events), 1.0)
        reader.whole(chance.choice(events), 2.0)
        assert reader.text is None or isinstance(reader.text, str)
        assert reader.finish is None or isinstance(reader.finish, str)

    def baseline(self, chance: random.Random) -> None:
        stored = json.loads(to_json(BASELINE))
        damaged = read_baseline(self.write("baseline.json", mutated_json(stored, chance)))
        check_comparable(damaged, BASELINE)
        judge(damaged, BASELINE, "ttft_ms", 0.02)


# Cases of `make test` and of `make test-all`, by cost: 20,000 and 1,000,000 in all.
COUNTS = {
    "recipe": (600, 30_000), "bulk": (1_400, 70_000), "cluster": (1_500, 75_000), "config": (1_500, 75_000),
    "events": (2_500, 125_000), "result_file": (2_000, 100_000), "job_store": (1_000, 50_000),
    "archive": (1_500, 75_000), "token_file": (3_000, 150_000), "weights": (2_000, 100_000),
    "faults": (500, 25_000), "trace": (600, 30_000), "dataset": (400, 20_000), "hf_config": (700, 35_000),
    "server_stream": (500, 25_000), "baseline": (300, 15_000),
}  # fmt: skip


# Seeds that were once internal errors.
CORRECTED = {
    "recipe": [1_001_419, 1_002_486, 1_007_378, 1_009_068, 1_025_399],
    "bulk": [1_048_886, 1_050_547],
    "job_store": [1_002_924],
}


def run_cases(kind: str, seeds: Iterable[int], folder: Path) -> None:
    """Run all cases, then raise what went wrong in the first few."""
    inputs = Inputs(folder)
    failures: list[str] = []

    def out_of_time(*_: object) -> None:
        raise AssertionError(f"took more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, out_of_time)
    try:
        for seed in [int(os.environ["FUZZ_SEED"])] if "FUZZ_SEED" in os.environ else seeds:
            signal.alarm(SECONDS)
            try:
                getattr(inputs, kind)(random.Random(seed))
            except LlmbError as error:
                if len(str(error)) >= 5000:
                    failures.append(f"{kind} case {seed}: a message of {len(str(error))} characters")
            except Exception as error:
                failures.append(f"{kind} case {seed}: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert not failures, f"{len(failures)} cases: {failures[:20]}"


def test_counts_add_up_to_the_promised_campaigns():
    assert [sum(counts) for counts in zip(*COUNTS.values(), strict=True)] == [20_000, 1_000_000]


@pytest.mark.parametrize("kind", COUNTS)
def test_no_mutated_input_is_an_internal_error(kind, tmp_path):
    run_cases(kind, range(COUNTS[kind][0]), tmp_path)


@pytest.mark.parametrize("kind", CORRECTED)
def test_corrected_inputs_stay_so(kind, tmp_path):
    run_cases(kind, CORRECTED[kind], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", COUNTS)
def test_a_million_mutated_inputs(kind, tmp_path, campaign):
    campaign("mutated inputs", COUNTS[kind][1])
    run_cases(kind, range(10**6, 10**6 + COUNTS[kind][1]), tmp_path)
