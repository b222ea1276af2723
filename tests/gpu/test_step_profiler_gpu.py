"""Step profiler on a GPU: kernels are classified and add up to the step; a run resumes where it ended."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_checks import NEEDS_GPU
from small_models import llama_model
from training_run import run_config, train_to_the_end

from llmb.config.spec import Profile, Training
from llmb.train.step_profiler import ATTENTION, COMMUNICATION, IDLE, KINDS, MATMUL, MEMORY, OPTIMIZER

pytestmark = NEEDS_GPU

MODEL = llama_model(layers=4, hidden=2048, ffn=8192, heads=16, kv_heads=8, vocab=32000)
CONFIG = run_config(MODEL, "bf16", Training(seqlen=4096, mbs=1, gbs=2, ga=2, steps=8, window=(3, 8)))
# A checkpoint of CONFIG's model takes longer than all its steps.
SMALL = replace(MODEL, hidden=512, ffn=2048, heads=4, kv_heads=2)


@pytest.mark.exclusive  # measures time
def test_kernels_add_up_to_the_step(tmp_path: Path) -> None:
    profiled = replace(CONFIG, profile=Profile(profile=True, profile_start=5, profile_stop=8))
    steps = train_to_the_end(profiled, tmp_path)
    time = json.loads((tmp_path / "profile" / "time.json").read_text())
    fractions = {row["kind"]: row["share"] for row in time["time_spent"]}
    assert tuple(fractions) == KINDS
    assert sum(fractions.values()) == pytest.approx(1)
    assert all(fractions[kind] > 0.005 for kind in (MATMUL, ATTENTION, OPTIMIZER, MEMORY))
    assert fractions[MATMUL] > 0.2  # most of the FLOPs of a step of more than a billion parameter uses
    assert fractions[COMMUNICATION] == 0
    assert 0 <= fractions[IDLE] < 0.7
    assert time["steps"] == [5, 6, 7]
    assert time["source"] == "GPU kernels"
    assert time["step_s"] == pytest.approx(sum(s.seconds for s in steps[4:7]) / 3, rel=0.2)
    with gzip.open(tmp_path / "profile" / "trace.rank0.json.gz") as file:
        trace = json.load(file)["traceEvents"]
    kernels = {event["name"] for event in trace if event.get("cat") == "kernel"}
    print("\n".join(sorted(f"{row['seconds_per_step']:.6f} {row['kind']}: {row['name']}" for row in time["longest"])))
    assert len(kernels) > 10


def test_resumed_run_continues_where_the_first_ended(tmp_path: Path) -> None:
    config = replace(CONFIG, model=SMALL)
    straight = train_to_the_end(config, tmp_path / "straight")
    half = replace(config, workload=replace(config.workload, steps=4, checkpoint_every=2))
    first = train_to_the_end(half, tmp_path / "first")
    resumed = replace(config, workload=replace(config.workload, resume=str(tmp_path / "first")))
    resumed_steps = train_to_the_end(resumed, tmp_path / "resumed")
    assert [step.step for step in resumed_steps] == [5, 6, 7, 8]
    # Equal runs differ by the order of atomic additions in the backward pass of attention.
    losses, expected = ([s.loss for s in steps] for steps in (first + resumed_steps, straight))
    assert losses == pytest.approx(expected, rel=2e-3)
    # A checkpoint is loaded to the bit: the first loss depends on nothing else.
    repeated = replace(resumed, workload=replace(resumed.workload, steps=5))
    assert train_to_the_end(repeated, tmp_path / "repeated")[0].loss == resumed_steps[0].loss
