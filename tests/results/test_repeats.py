"""Intervals over repeats of a run."""

import random
from statistics import stdev

import pytest

from llmb.perfmodel.metrics import summarize
from llmb.report.repeat_table import repeats
from llmb.results.repeats import interval, intervals
from llmb.results.result import Result


def served(rate, status="ok", **more):
    return Result(name="a run", status=status, output_tokens_per_s=rate, **more)


def test_a_worked_example():
    """10, 12, 14: mean 12, s = 2, t(2) = 4.303, so 12 +- 4.303 x 2 / sqrt(3) = 12 +- 4.969."""
    actual = interval("tokens/s", [10.0, 12.0, 14.0])
    assert (actual.n, actual.mean) == (3, 12.0)
    assert actual.low == pytest.approx(12 - 4.9687, abs=1e-3)
    assert actual.high == pytest.approx(12 + 4.9687, abs=1e-3)
    assert actual.error == pytest.approx(4.9687 / 12, abs=1e-4)
    assert actual.spread == pytest.approx(4 / 12)


def test_an_interval_ends_where_rates_do():
    actual = interval("tokens/s", [10.0, 20.0])
    assert (actual.low, actual.mean) == (0.0, 15.0)
    assert actual.high == pytest.approx(15 + 12.706205 * 5)  # s / sqrt(2) = 5


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    chance = random.Random(1)
    for runs in (2, 3, 5):
        samples = [[chance.gauss(100, 5) for _ in range(runs)] for _ in range(2000)]
        held = sum(actual.low <= 100 <= actual.high for actual in (interval("x", drawn) for drawn in samples))
        assert 0.93 < held / 2000 < 0.97


def test_one_run_has_no_interval():
    assert interval("x", [1.0]) is None
    assert interval("x", [1.0, float("nan")]) is None
    assert intervals([served(1.0)]) == []
    assert intervals([served(1.0), served(2.0, status="failed")]) == []
    assert repeats([served(1.0)]) == ""
    assert repeats([]) == ""


def test_only_figures_that_every_good_run_has():
    results = [served(10.0, ttft_ms={"mean": 5.0}), served(12.0), served(14.0, status="oom")]
    assert [(i.metric, i.n) for i in intervals(results)] == [("output tokens/s, whole run", 2)]


def test_training_and_serving_each_have_their_figures():
    trained = [Result(name="t", status="ok", tokens_per_s=v, step_time_s=summarize([1 / v])) for v in (100.0, 110.0)]
    assert [i.metric for i in intervals(trained)] == ["step time (s, median)", "tokens/s"]
    text = repeats([served(v, ttft_ms={"mean": v}, request_throughput=v) for v in (99.0, 100.0, 101.0)])
    assert "over 3 of 3 runs" in text
    assert stdev((99.0, 100.0, 101.0)) == 1
    assert "97.52 to 102.5" in text  # 4.303 / sqrt(3) = 2.484
    assert "2.5%" in text
    assert "2.0%" in text
    assert all(word in text for word in ("requests/s", "TTFT (ms, mean)", "whole run"))
