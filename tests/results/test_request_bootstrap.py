"""Ratios of serving figures of two runs with intervals over requests: exact ratios, coverage, correlated requests."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.events import RequestDone
from llmb.perfmodel import metrics
from llmb.results.request_bootstrap import FEWEST_REQUESTS, request_ratios


def load(count=200, speed=1.0, concurrency=8, noise=0.1, seed=1, tokens=32, shared=0.0):
    """Closed loop of `concurrency` users; `shared`: noise that all requests of a moment have in common."""
    chance = random.Random(seed)
    clocks, requests = [0.0] * concurrency, []
    drift = 1.0
    for n in range(count):
        user = n % concurrency
        if user == 0:
            drift = 1 + shared * chance.gauss(0, 1)
        start = clocks[user]
        ttft = 0.1 / speed * drift * (1 + noise * chance.uniform(-1, 1))
        end = start + ttft + 0.01 * (tokens - 1) / speed * drift * (1 + noise * chance.uniform(-1, 1))
        clocks[user] = end
        requests.append(
            RequestDone(
                request=n, arrival=start, first_token=start + ttft, end=end, input_tokens=16, output_tokens=tokens
            )
        )
    return requests


def test_ratios_are_those_of_the_metrics():
    a, b = load(seed=1), load(seed=2, speed=1.3)
    ratios = {ratio.figure: ratio for ratio in request_ratios(a, b)}
    assert list(ratios) == ["output_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms"]
    for requests, value in ((a, ratios["output_tokens_per_s"].a), (b, ratios["output_tokens_per_s"].b)):
        assert value == pytest.approx(metrics.throughput(requests).output_tokens_per_s)
    for name, samples in metrics.request_latencies_ms(b).items():
        assert ratios[name].b == pytest.approx(metrics.latency_summary(samples)["mean"])


def test_a_faster_run_is_seen_in_every_figure_and_noise_in_none():
    for ratio in request_ratios(load(seed=1), load(seed=2, speed=1.1)):
        assert ratio.differs
        assert (ratio.ratio > 1) == ratio.higher_is_better
        assert ratio.low < ratio.ratio < ratio.high
    assert not any(ratio.differs for ratio in request_ratios(load(seed=3), load(seed=4)))


def test_swapping_the_runs_gives_the_opposite_verdict():
    for forward, backward in zip(
        request_ratios(load(seed=1), load(seed=2, speed=1.2)),
        request_ratios(load(seed=2, speed=1.2), load(seed=1)),
        strict=True,
    ):
        assert forward.ratio == pytest.approx(1 / backward.ratio)


def test_the_interval_holds_the_truth_although_requests_share_batches():
    """Requests of one moment vary together by 10 %: an interval over single requests would be a third as wide."""
    held = 0
    for seed in range(30):
        a = load(400, seed=2 * seed, noise=0.01, shared=0.1)
        b = load(400, seed=2 * seed + 1, noise=0.01, shared=0.1)
        ttft = next(ratio for ratio in request_ratios(a, b) if ratio.figure == "ttft_ms")
        held += not ttft.differs
    assert held >= 24  # 28.5 expected


def test_blocks_are_as_long_as_requests_are_correlated():
    """Waves of 16 that share all their noise need longer blocks than independent requests."""
    independent, waves = (
        {r.figure: r.blocks[0][1] for r in request_ratios(a, a)}
        for a in (load(96, noise=0.1), load(960, concurrency=16, noise=0.01, shared=0.1))
    )
    assert independent["ttft_ms"] <= 3
    assert waves["ttft_ms"] >= 16
    assert waves["e2e_ms"] >= 16


def test_too_few_requests_give_no_interval():
    for ratio in request_ratios(load(FEWEST_REQUESTS - 1), load(speed=2.0)):
        assert (ratio.low, ratio.high, ratio.differs) == (None, None, None)


def test_figures_that_a_run_lacks_are_left_out():
    whole = [
        RequestDone(request=n, arrival=float(n), end=n + 0.5, input_tokens=4, output_tokens=8) for n in range(20)
    ]  # not streamed: no first token
    assert [ratio.figure for ratio in request_ratios(whole, whole)] == ["output_tokens_per_s", "e2e_ms"]
    assert request_ratios([], load()) == []


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_the_interval_contains_the_ratio_for_any_number_of_requests(count_a, count_b, seed):
    for ratio in request_ratios(load(count_a, seed=seed), load(count_b, seed=seed + 1)):
        if ratio.low is not None:
            assert ratio.low * 0.98 <= ratio.ratio <= ratio.high * 1.02
