"""Expected goodput and the best checkpoint interval of Young and Daly."""

import pytest

from llmb.perfmodel.goodput.checkpoint_interval import best_interval_s, expected_fraction


def test_best_interval_is_the_square_root_of_twice_the_product() -> None:
    assert best_interval_s(checkpoint_s=2.0, between_faults_s=3600.0) == pytest.approx(120.0)


def test_best_interval_gives_the_highest_expected_goodput() -> None:
    best = best_interval_s(2.0, 36_000.0)
    fractions = {factor: expected_fraction(factor * best, 2.0, 36_000.0, 60.0) for factor in (0.5, 0.9, 1.0, 1.1, 2.0)}
    assert max(fractions, key=fractions.__getitem__) == 1.0
    assert fractions[1.0] == pytest.approx(1 - 2 / best - best / 72_000 - 60 / 36_000, abs=2e-4)


def test_faults_that_come_before_any_checkpoint_leave_nothing() -> None:
    assert expected_fraction(interval_s=100.0, checkpoint_s=1.0, between_faults_s=50.0, outage_s=0.0) == 0.0
