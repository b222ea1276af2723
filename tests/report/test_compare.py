"""Comparing runs: the ratio with its interval, the verdict, what differs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError
from llmb.events import RunEnded, StepDone
from llmb.report.compare import compare, speed_ratio, text
from llmb.results.derive import derive


def noisy(mean, count=20, spread=0.01, seed=1):
    chance = random.Random(seed)
    return [mean * (1 + spread * chance.gauss(0, 1)) for _ in range(count)]


def test_a_real_difference_is_seen_and_noise_is_not():
    faster = speed_ratio(noisy(1.0, seed=1), noisy(0.9, seed=2))
    assert faster.words.startswith("B is faster, by 11")
    assert faster.low < 1 / 0.9 < faster.high
    assert speed_ratio(noisy(0.9, seed=3), noisy(1.0, seed=4)).words.startswith("B is slower")
    assert speed_ratio(noisy(1.0, seed=5), noisy(1.0, seed=6)).words == "no difference seen"
    assert "too few" in speed_ratio([1.0, 1.0], [0.5, 0.5]).words


def test_one_slow_step_does_not_move_the_verdict():
    spoiled = [*noisy(1.0, 19, seed=7), 50.0]
    assert speed_ratio(spoiled, noisy(1.0, seed=8)).ratio == pytest.approx(1.0, abs=0.02)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for seed in range(200):
        verdict = speed_ratio(noisy(1.0, 15, 0.05, 2 * seed), noisy(0.97, 15, 0.05, 2 * seed + 1))
        held += verdict.low <= 1 / 0.97 <= verdict.high
    assert 180 <= held <= 199


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
def test_swapping_the_runs_inverts_the_ratio(a, b):
    forward, backward = speed_ratio(a, b), speed_ratio(b, a)
    assert forward.ratio == pytest.approx(1 / backward.ratio)
    if forward.low is not None:
        assert forward.low <= forward.ratio <= forward.high
        assert forward.low == pytest.approx(1 / backward.high)


@pytest.fixture
def run(recipes):
    def make(seconds, **changes):
        overrides = tuple(Setting(field=k, value=v, source="--set") for k, v in changes.items())
        config = resolve(
            recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small", settings=overrides)
        )
        tokens = config.workload.gbs * config.workload.seqlen
        events = [
            StepDone(step=n, seconds=s, tokens=tokens) for n, s in enumerate(noisy(seconds, config.workload.steps), 1)
        ]
        return config, derive(config, [*events, RunEnded(status="ok")])

    return make


def test_differing_fields_come_first(run):
    output = text(compare(run(1.0), run(0.8, lr="0.001")))
    assert output.index("workload.lr") < output.index("tokens_per_s") < output.index("verdict: B is faster")
    assert "same configuration" in text(compare(run(1.0), run(1.0)))


def test_runs_that_cannot_be_compared_are_refused(run, recipes):
    config, result = run(1.0)
    with pytest.raises(ConfigError, match="no figures"):
        compare((config, result), (config, derive(config, [])))
    second = resolve(recipes["pretrain_grok1"], RunRequest(size="314b", dtype="fp32", gpus=1, proxy="small"))
    events = [StepDone(step=n, seconds=1.0, tokens=10) for n in range(1, second.workload.steps + 1)]
    grok = second, derive(second, [*events, RunEnded(status="ok")])
    with pytest.raises(ConfigError, match="different workloads"):
        compare((config, result), grok)
    assert compare((config, result), grok, force=True)["differing"]["target"]
