"""Plans of sweeps: loads of points, bounds of searches, estimates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.loadgen.sweep.ladder import Precision
from llmb.loadgen.sweep.load_search import next_of_many
from llmb.loadgen.sweep.sweep_plan import E2E_GROWTH, LIMIT_TIMES, SweepPlan


def plan(**changes):
    fields = {"name": "s", "mode": "url", "load_kind": "concurrency", "ladder": (1, 2, 4, 8, 16, 32, 64), "isl": 1000}
    return SweepPlan(**{**fields, "osl": 500, **changes})


def test_an_estimate_counts_points_requests_and_tokens():
    cost = plan(repeats=2, point_s=10.0).estimate()
    assert cost.points == 14
    assert cost.seconds == 140
    assert cost.requests == 2 * (4 + 4 + 8 + 16 + 32 + 64 + 128)
    assert cost.tokens == 1500 * cost.requests
    assert plan(isl=None).estimate().tokens is None


@given(st.lists(st.integers(0, 1100), min_size=1, max_size=4), st.integers(1, 1024), st.sampled_from([0.0, 0.05, 0.2]))
def test_a_search_stays_within_the_number_of_points_that_was_announced(optima, highest, relative):
    """Whatever the optima of the tiers are."""
    spec = plan(
        ladder=(1, highest) if highest > 1 else (1,), search=True, precision=Precision(relative=relative),
        tiers={str(i): "ttft=1s" for i in range(len(optima))},
    )  # fmt: skip
    measured = []
    while (load := spec.next_load(measured, [{m: m <= o for m in measured} for o in optima])) is not None:
        measured.append(load)
    assert len(measured) <= spec.most_points
    assert next_of_many([{m: m <= o for m in measured} for o in optima], spec.range) is None


def test_a_rate_lasts_as_long_as_a_point():
    load = plan(load_kind="rate", ladder=(2.5,), point_s=20.0).point_load(2.5, {})
    assert (load.requests, load.ramp_s, load.for_s) == (50, 0.0, None)
    assert load.limit_s == LIMIT_TIMES * 20.0
    assert plan(load_kind="rate", ladder=(0.5,), point_s=4.0).point_load(0.5, {}).requests == 16
    assert plan(load_kind="rate", ladder=(0.1,), point_s=4.0).point_load(0.1, {}).requests == 4


def test_an_overloaded_server_does_not_hold_a_rate_up_for_ever():
    spec = plan(load_kind="rate", ladder=(1, 2, 4), point_s=20.0)
    assert spec.point_load(4, {}).timeout_s is None
    assert spec.point_load(4, {1: (1.0, 5000.0), 2: (2.0, 9000.0)}).timeout_s == 90  # ten times 5 s, and twice 20 s
    assert spec.point_load(4, {1: (1.0, 50.0)}).timeout_s == 60


def test_a_concurrency_is_held_for_a_point_or_for_two_waves():
    spec = plan(point_s=10.0, ramp=0.5)
    assert spec.point_load(1, {}).for_s == 10.0
    fast = spec.point_load(2, {1: (50.0, 20.0)})
    assert (fast.requests, fast.ramp_s) == (625, 0.01)  # 50 requests/s, a quarter more for the larger batch
    assert spec.point_load(64, {32: (1.0, 32_000.0)}).requests == 128
    assert spec.point_load(4, {8: (50.0, 20.0)}).requests == 250  # half of the rate of twice the users
    assert spec.point_load(64, {}).for_s is None  # a second may not even finish the first wave
    assert spec.point_load(64, {32: (None, None)}).requests == 128


def test_the_time_that_is_left_grows_with_the_batch():
    spec = plan(point_s=10.0, ladder=(1, 2, 4))
    assert spec.seconds_left({}) is None
    assert spec.seconds_left({1: 1000.0, 2: 1000.0}) == pytest.approx(10 + 2**E2E_GROWTH)
    assert spec.seconds_left({1: 100_000.0, 2: 100_000.0}) == pytest.approx(2 * 100 * 2**E2E_GROWTH)
    assert spec.seconds_left({1: 1000.0, 2: 1000.0, 4: 1000.0}) == 0
