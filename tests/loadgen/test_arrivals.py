"""Arrival processes: rates, distributions, ramps, and equal seeds giving equal times."""

import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmb.loadgen.arrivals import Arrivals, arrival_times, share, slot_starts


def times(arrivals: Arrivals, count: int, seed: int = 1) -> list[float]:
    return list(islice(arrival_times(arrivals, seed), count))


def gaps(values: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(values)]


def test_constant_rate_has_equal_intervals_from_the_start():
    assert times(Arrivals("constant", 4.0), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_poisson_intervals_are_exponential():
    intervals = gaps(times(Arrivals("poisson", 50.0), 20_000))
    assert statistics.fmean(intervals) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(intervals) == pytest.approx(0.02, rel=0.03)
    below = sum(gap < 0.02 for gap in intervals) / len(intervals)
    assert below == pytest.approx(1 - 2.718281828**-1, abs=0.01)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_intervals_have_the_burstiness_as_shape(shape):
    intervals = gaps(times(Arrivals("gamma", 10.0, shape), 20_000))
    assert statistics.fmean(intervals) == pytest.approx(0.1, rel=0.05)
    assert (statistics.stdev(intervals) / statistics.fmean(intervals)) ** 2 == pytest.approx(1 / shape, rel=0.1)


def test_poisson_is_not_rescaled_to_a_total():
    ends = {round(times(Arrivals("poisson", 10.0), 100, seed)[-1], 6) for seed in range(20)}
    assert len(ends) == 20  # a rescaled schedule would end at 10 s with every seed
    assert statistics.fmean(ends) == pytest.approx(10.0, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["constant", "poisson", "gamma"]),
    rate=st.floats(0.01, 1e4),
    shape=st.floats(0.1, 10),
    ramp=st.floats(0, 100),
    start=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@example(kind="gamma", rate=6.0, shape=0.1, ramp=6.0, start=0.0, seed=221)  # intervals of less than the last bit
def test_times_rise_and_depend_on_the_seed_alone(kind, rate, shape, ramp, start, seed):
    arrivals = Arrivals(kind, rate, shape, ramp, start)
    values = times(arrivals, 50, seed)
    assert values == times(arrivals, 50, seed)
    assert all(0 <= a <= b for a, b in pairwise(values))
    interleaved = [*islice(arrival_times(arrivals, seed), 0, 50, 2)], [*islice(arrival_times(arrivals, seed), 1, 50, 2)]
    assert sorted([*interleaved[0], *interleaved[1]]) == values


def test_a_ramp_raises_the_rate_linearly():
    values = times(Arrivals("constant", 100.0, ramp_s=10.0), 3000)
    by_second = [sum(k <= value < k + 1 for value in values) for k in range(12)]
    assert by_second[0] == pytest.approx(5, abs=1)
    assert by_second[5] == pytest.approx(55, abs=2)
    assert by_second[11] == pytest.approx(100, abs=1)
    half = times(Arrivals("constant", 100.0, ramp_s=10.0, ramp_start=0.5), 1000)
    assert sum(value < 1 for value in half) == pytest.approx(52, abs=2)


def test_users_of_a_closed_loop_begin_one_after_the_other():
    assert slot_starts(3) == [0.0, 0.0, 0.0]
    assert slot_starts(4, ramp_s=8.0) == [0.0, 2.0, 4.0, 6.0]
    assert slot_starts(4, ramp_s=8.0, ramp_start=0.5) == [0.0, 0.0, 0.0, 4.0]


@given(total=st.integers(0, 1000), size=st.integers(1, 17))
def test_processes_share_everything(total, size):
    assert sum(share(total, index, size) for index in range(size)) == total
