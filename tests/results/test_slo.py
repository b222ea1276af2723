"""Limits of a sweep: parsing, refusals, judging."""

import pytest

from llmb.errors import ConfigError
from llmb.results.result import Result
from llmb.results.sweep.slo import SloLimit, broken_limits, parse_slo, parse_tiers


def limit(figure, statistic, value):
    return SloLimit(figure=figure, statistic=statistic, limit=value)


def test_limits_have_p99_by_default_and_any_unit():
    assert parse_slo("ttft=500ms, tpot.p50=0.05s,e2e.mean=2s,itl=70") == (
        limit("ttft_ms", "p99", 500.0),
        limit("tpot_ms", "p50", 50.0),
        limit("e2e_ms", "mean", 2000.0),
        limit("itl_ms", "p99", 70.0),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no limit"),
        ("tttf=5ms", "did you mean ttft"),
        ("ttft.p98=5ms", "unknown statistic"),
        ("ttft=0ms", "above 0"),
        ("ttft=5min", "expected a time"),
        ("ttft", "expected a time"),
        ("ttft=-5ms", "expected a time"),
        ("ttft=5ms,ttft.p99=6ms", "ttft p99 has two limits"),
    ],
)
def test_wrong_limits_are_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


def test_tiers_are_mappings_or_texts():
    tiers = parse_tiers({"interactive": {"ttft": "500ms", "tpot.p50": 30}, "batch": "e2e=60s"}, "tiers.yaml")
    assert list(tiers) == ["interactive", "batch"]
    assert tiers["interactive"][1] == limit("tpot_ms", "p50", 30.0)
    for wrong in (None, [], {}, {"a": None}, {"a": 5}):
        with pytest.raises(ConfigError, match=r"tiers\.yaml"):
            parse_tiers(wrong, "tiers.yaml")


def test_a_load_is_judged_by_every_limit():
    figures = Result(name="x", status="ok", ttft_ms={"p99": 612.0, "p50": 90.0}, tpot_ms={"p99": 20.0})
    assert broken_limits(figures, parse_slo("ttft.p50=100ms,tpot=20ms")) == ()
    assert broken_limits(figures, parse_slo("ttft=500ms,e2e=1s")) == ("ttft p99 612 ms > 500 ms", "e2e p99 is unknown")
    failed = Result(name="x", status="ok", requests_failed=2, ttft_ms={"p99": 1.0})
    assert broken_limits(failed, parse_slo("ttft=500ms")) == ("2 requests failed",)
