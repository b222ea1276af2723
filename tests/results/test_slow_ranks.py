"""Who holds the others up: the rank that waits least, told apart from noise, from other stages and from the unknown."""

import os
import random
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import llama_model

from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
from llmb.events import RunEnded, RunStarted, StepDone, read_all
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.slow_ranks import _median_without, slow_ranks

STEPS = 20


def config(gpus: int, steps: int = STEPS) -> RunConfig:
    return RunConfig(
        name="tiny",
        target="pretrain_tiny",
        size="8b",
        machine=Machine(gpu="cpu", gpus=gpus, gpus_per_node=gpus),
        model=llama_model(hidden=8, ffn=16, heads=2, kv_heads=1, vocab=32),
        parallel=Parallel(dp=gpus),
        precision=Precision(dtype="fp32"),
        workload=Training(seqlen=16, mbs=1, gbs=gpus, ga=1, steps=steps, window=(3, steps)),
    )


def events(work, ranks_per_host=2):
    """Events of ranks whose own work in step n is work[rank](n) seconds; the slowest makes the step."""
    actual = [RunStarted(time=1.0, rank=rank, host=f"n{rank // ranks_per_host}") for rank in range(len(work))]
    for step in range(1, STEPS + 1):
        busy_times = [seconds(step) for seconds in work]
        actual += [
            StepDone(step=step, rank=rank, seconds=max(busy_times), busy_s=busy, tokens=16)
            for rank, busy in enumerate(busy_times)
        ]
    return actual


def steady(seconds):
    return lambda step: seconds


def slow(work, **options):
    return slow_ranks(events(work), (3, STEPS), max(seconds(3) for seconds in work), **{"stage_ranks": 64} | options)


def test_a_slow_rank_its_host_and_how_much():
    (actual,) = slow([steady(1.0)] * 5 + [steady(1.5)] + [steady(1.0)] * 2)
    assert (actual.rank, actual.host, actual.own_s, actual.usual_s, actual.ratio) == (5, "n2", 1.5, 1.0, 1.5)


def test_of_two_ranks_one_can_be_slow():
    (actual,) = slow([steady(0.5), steady(1.0)])
    assert (actual.rank, actual.ratio) == (1, 2.0)


def test_a_slow_node_is_all_its_ranks_and_one_warning():
    actual = slow([steady(1.0)] * 2 + [steady(1.4), steady(1.5)])
    assert [item.rank for item in actual] == [2, 3]
    ended = RunEnded(status="ok")
    result = derive(config(4), [*events([steady(1.0)] * 2 + [steady(1.4), steady(1.5)]), ended])
    (warning,) = [w.text for w in result.warnings if w.code == "SLOW_RANK"]
    assert warning.startswith("ranks 2, 3 on n1 hold the others up: 1.5 s of own work a step, ")
    assert "slow rank 3 on n1" in summary(result)


def test_noise_makes_nobody_slow():
    noise = random.Random(7)
    assert slow([lambda step: noise.uniform(0.8, 1.2)] * 16) == ()


def test_a_rank_that_is_slow_now_and_then_is_not_slow():
    assert slow([steady(1.0)] * 3 + [lambda step: 3.0 if step % 2 else 1.0]) == ()


def test_a_hiccup_does_not_hide_a_slow_rank():
    (actual,) = slow([steady(1.0)] * 3 + [lambda step: 0.9 if step == 7 else 2.0])
    assert actual.rank == 3


def test_what_cannot_be_known_is_not_said():
    alone = [StepDone(step=n, busy_s=1.0) for n in range(1, 50)]
    assert slow_ranks(alone, (1, 50), 1.0, 8) == ()
    gpus = [StepDone(step=n, rank=r, seconds=1.0, busy_s=None) for n in range(1, 50) for r in range(4)]
    assert slow_ranks(gpus, (1, 50), 1.0, 8) == ()
    few = [StepDone(step=n, rank=r, seconds=1.0, busy_s=1.0 + r) for n in range(1, 5) for r in range(4)]
    assert slow_ranks(few, (1, 50), 1.0, 8) == ()


def test_a_pipeline_stage_is_compared_with_itself():
    work = [steady(1.0), steady(1.0), steady(2.0), steady(2.0)]
    assert slow(work, stage_ranks=2) == ()
    assert [item.rank for item in slow([steady(1.0), steady(1.6), *work[2:]], stage_ranks=2)] == [1]


@given(st.lists(st.floats(0, 10, allow_nan=False), min_size=2, max_size=9), st.data())
def test_the_median_of_the_others(values, data):
    chosen = data.draw(st.integers(0, len(values) - 1))
    other_values = values[:chosen] + values[chosen + 1 :]
    assert _median_without(sorted(values), values[chosen]) == pytest.approx(median(other_values))


def train_with_slow_rank(rank: int, folder: Path, config: RunConfig) -> None:
    from llmb.runtime.recorder import EventRecorder
    from llmb.train import loop

    train_step = loop.train_step

    def slowed_step(*arguments: Any) -> Any:
        if rank == 1:
            time.sleep(0.25)
        return train_step(*arguments)

    loop.train_step = slowed_step  # of this forked process
    os.chdir(folder)
    recorder = EventRecorder(folder, rank)
    loop.train(config, recorder)
    recorder.end("ok", None)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_real_run_with_a_slow_rank(tmp_path: Path) -> None:
    from forked_ranks import on_ranks

    two = config(2, steps=9)
    on_ranks(2, train_with_slow_rank, tmp_path, two)
    result = derive(two, read_all(sorted(tmp_path.glob("events.rank*.jsonl"))))
    assert result.status == "ok"
    (actual,) = result.slow_ranks
    assert (actual.rank, actual.host) == (1, os.uname().nodename)
    assert actual.own_s >= 0.25
    assert actual.ratio > 1.2
