"""Medians of correlated samples: coverage, block length, symmetry, cost of long series; Student's quantiles."""

import random

import pytest

from llmb.errors import ConfigError
from llmb.results.compare.median_interval import MOST_BLOCKS, block_length, median_interval, ratio_of
from llmb.results.compare.student import student_quantile


def series(n, correlation=0.0, seed=1, mean=1.0, spread=0.01):
    """AR(1) process around a mean."""
    chance = random.Random(seed)
    state, samples = chance.gauss(0, 1), []
    for _ in range(n):
        state = correlation * state + (1 - correlation**2) ** 0.5 * chance.gauss(0, 1)
        samples.append(mean * (1 + spread * state))
    return samples


def coverage(n, correlation, trials=50):
    ratios = [
        ratio_of(
            median_interval(series(n, correlation, 2 * seed)), median_interval(series(n, correlation, 2 * seed + 1))
        )
        for seed in range(trials)
    ]
    return sum(ratio.low <= 1 <= ratio.high for ratio in ratios if ratio.low) / sum(r.low is not None for r in ratios)


@pytest.mark.parametrize(("n", "correlation"), [(10, 0.0), (40, 0.0), (40, 0.5), (200, 0.8)])
def test_the_interval_holds_the_truth_although_steps_are_correlated(n, correlation):
    assert coverage(n, correlation) >= 0.88


def test_blocks_are_as_long_as_the_correlation_and_singles_without():
    def of(samples):
        middle = sorted(samples)[len(samples) // 2]
        return block_length([x > middle for x in samples])

    assert of(series(400, 0.0)) <= 2
    assert of(series(400, 0.5)) < of(series(400, 0.95))
    assert of(series(400, 0.95)) > 10
    assert of([1.0, 2.0] * 50) == 1  # alternating samples need no blocks
    assert of([1.0] * 50) == 1


def test_the_interval_of_a_drifting_series_is_its_range():
    drifting = [1.0 + 0.01 * n for n in range(20)]
    interval = median_interval(drifting)
    assert (interval.low, interval.high) == (min(drifting), max(drifting))
    assert interval.block > 6


def test_few_samples_give_no_interval_and_none_an_error():
    assert median_interval([1.0, 1.1, 1.2, 1.3]).low is None
    assert median_interval([1.0] * 5).low == 1.0
    with pytest.raises(ConfigError, match="no measured steps"):
        median_interval([])


def test_a_hundred_thousand_samples_need_no_more_blocks():
    interval = median_interval(series(100_000, 0.9))
    assert interval.blocks == MOST_BLOCKS
    assert interval.block * interval.blocks == 100_000
    assert interval.low < 1.0005
    assert interval.high > 0.9995
    assert interval.high / interval.low < 1.002


def test_quantiles_are_those_of_the_printed_table():
    printed = {
        1: 12.706,
        2: 4.303,
        3: 3.182,
        4: 2.776,
        5: 2.571,
        10: 2.228,
        15: 2.131,
        30: 2.042,
        60: 2.000,
        120: 1.980,
    }
    for freedom, quantile in printed.items():
        assert student_quantile(0.95, freedom) == pytest.approx(quantile, abs=6e-4)
    assert student_quantile(0.99, 9) == pytest.approx(3.250, abs=6e-4)
    assert student_quantile(0.9987, 1) == pytest.approx(489.7, abs=0.1)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_time_that_is_not_finite_is_one_line(wrong: float) -> None:
    with pytest.raises(ConfigError, match="not finite"):
        median_interval([1.0, wrong, *[1.0 + n / 100 for n in range(50)]])
