"""Sequential test of two configurations: error rates over many simulated tests, power, floor, order of runs."""

import math
import random

import pytest

from llmb.errors import ConfigError
from llmb.results.compare.paired_test import ALPHA, look_levels, look_pairs, paired_test

NOISE = 0.003  # relative, from run to run


def simulated(seed, difference=0.0, noise=NOISE, drift=0.0, heavy=False, pairs=10):
    """Test of two processes; `drift`: of each run against the one before; `heavy`: one run of ten is 5 x as noisy."""
    chance, runs = random.Random(seed), 0

    def measure(side):
        nonlocal runs
        runs += 1
        wide = 5 if heavy and chance.random() < 0.1 else 1
        slow = math.exp(drift * runs + noise * wide * chance.gauss(0, 1))
        return slow / (1 + difference if side == "B" else 1)

    return paired_test(measure, pairs)


@pytest.mark.parametrize("kind", [{}, {"drift": 0.001}, {"heavy": True}, {"noise": 0.03}])
def test_identical_processes_are_called_different_in_at_most_five_percent(kind):
    trials = 1000
    different = sum(simulated(seed, **kind).outcome == "different" for seed in range(trials))
    assert different <= 0.05 * trials


def test_a_difference_of_one_percent_is_found():
    tests = [simulated(seed, difference=0.01) for seed in range(300)]
    different = [test for test in tests if test.outcome == "different"]
    assert len(different) >= 0.97 * len(tests)
    assert all(test.last.ratio > 1 for test in different)
    assert sum(test.last.low <= 1.01 <= test.last.high for test in tests) >= 0.95 * len(tests)
    assert sum(test.last.pairs for test in tests) / len(tests) < 8, "it ends before all pairs are run"


def test_equal_processes_end_at_the_floor_and_name_the_largest_difference():
    tests = [simulated(seed) for seed in range(100)]
    same = [test for test in tests if test.outcome == "same"]
    assert len(same) > 25  # the others run all pairs
    assert all(test.last.half_width <= math.log1p(test.floor) for test in same)
    assert all(0 < test.last.largest_difference < 0.03 for test in same)


def test_runs_alternate_and_a_runs_against_itself_first():
    order = []

    def measure(side):
        order.append(side)
        return 1.0 + 1e-6 * len(order)

    test = paired_test(measure, 4)
    assert "".join(order) == "A" * 8 + "ABBAABBA"
    assert test.last.ratio == pytest.approx(1.0, abs=1e-12), "a linear drift cancels"
    assert len(test.times_a) == len(test.times_b) == 4


def test_the_levels_of_all_looks_sum_to_five_percent():
    assert look_pairs(9) == [4, 6, 8, 9]
    for pairs in (4, 7, 10, 40):
        assert sum(look_levels(pairs).values()) == pytest.approx(ALPHA)
    for pairs in (3, 1000):
        with pytest.raises(ConfigError, match="expected 4 to 200 pairs"):
            look_levels(pairs)
