"""Sequential test of two configurations: error rates over many simulated tests, power, floor, order of runs."""

import math
import random
from statistics import median

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


STEP_NOISE, RUN_NOISE, STEPS = 0.003, 0.002, 10  # of a run on an H200: within it, between runs, measured steps
MACHINES = {  # what else moves the times: slowdown of the k-th run
    "steady": lambda k, walk: 0.0,
    "linear drift": lambda k, walk: 0.001 * k,
    "warming up": lambda k, walk: 0.01 * math.exp(-k / 6),
    "slower from the 12th run on": lambda k, walk: 0.01 / (1 + math.exp(12 - k)),
    "random walk": lambda k, walk: walk,
    "other load that comes and goes": lambda k, walk: 0.004 * math.sin(2 * math.pi * k / 9),
}


def simulated_machine(seed, machine, difference=0.0, correlation=0.8):
    """Test on a machine with AR(1) step times, a mean of its own for each run, and a drift between runs."""
    chance, runs, walk = random.Random(seed), 0, 0.0

    def measure(side):
        nonlocal runs, walk
        mean = MACHINES[machine](runs, walk) + RUN_NOISE * chance.gauss(0, 1) - (difference if side == "B" else 0.0)
        runs, walk = runs + 1, walk + 0.001 * chance.gauss(0, 1)
        noise, times = chance.gauss(0, 1), []
        for _ in range(STEPS):
            times.append(math.exp(mean + STEP_NOISE * noise))
            noise = correlation * noise + math.sqrt(1 - correlation**2) * chance.gauss(0, 1)
        return median(times)

    return paired_test(measure, 10)


def check_error_rates(trials, machine):
    tests = [simulated_machine(seed, machine) for seed in range(trials)]
    assert sum(test.outcome == "different" for test in tests) <= 0.05 * trials
    unequal = [simulated_machine(seed, machine, difference=0.01) for seed in range(trials // 4)]
    assert sum(test.outcome == "different" and test.last.ratio > 1 for test in unequal) >= 0.97 * len(unequal)


@pytest.mark.parametrize("machine", ["linear drift", "random walk"])
def test_error_rates_on_a_realistic_machine(machine):
    check_error_rates(200, machine)


@pytest.mark.nightly
@pytest.mark.parametrize("machine", MACHINES)
def test_error_rates_on_every_machine(machine):
    check_error_rates(2000, machine)


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
