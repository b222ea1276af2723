"""Figures and warnings of a load: scheduled latency, goodput, cache, client lateness, intervals."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.config.load_settings import LoadSettings, SloLimits, config_from_json, load_config, parse_slo, repeat_of
from llmb.config.serialization import build, to_plain
from llmb.errors import ConfigError
from llmb.events import ClientFacts, RequestDone, RunEnded
from llmb.loadgen.request_source import RequestSource
from llmb.perfmodel import load_metrics, metrics
from llmb.results.derive import derive
from llmb.results.result import Result

LOAD = LoadSettings(base_url="http://h", model="m", arrivals="constant", rate=1.0, num_requests=4, osl=3)
OK = RunEnded(status="ok")


def request(number: int, scheduled: float, sent: float, ttft: float, **changes) -> RequestDone:
    times = tuple(sent + ttft + gap for gap in (0.0, 0.1, 0.2))
    fields = {"first_token": times[0], "token_times": times, "end": times[-1], "input_tokens": 10, "output_tokens": 3}
    fields |= {"requested_tokens": 3, "scheduled": scheduled, "arrival": sent, "counted_by": "usage"}
    return RequestDone(request=number, **fields | changes)


FOUR = [request(n, float(n), n + 0.5, 0.25) for n in range(4)]


def codes(result: Result) -> set[str]:
    return {warning.code for warning in result.warnings}


def test_latency_from_the_scheduled_and_from_the_send_time():
    result = derive(load_config(LOAD), [*FOUR, OK])
    assert result.ttft_ms["p50"] == pytest.approx(250)
    assert result.ttft_scheduled_ms["p50"] == pytest.approx(750)
    assert result.e2e_ms["p99"] == pytest.approx(450)
    assert result.e2e_scheduled_ms["p99"] == pytest.approx(950)
    assert result.output_tokens_per_s_per_user_scheduled == pytest.approx(3 / 0.95)
    assert result.gpus is result.output_tokens_per_s_per_gpu is result.dtype is None


def test_goodput_counts_from_the_scheduled_time_and_failed_requests_as_bad():
    events = [*FOUR[:3], replace(FOUR[3], error="http 500: no"), OK]
    config = load_config(replace(LOAD, slo=SloLimits(ttft_ms=800.0, tpot_ms=150.0)))
    result = derive(config, events)
    assert result.slo_fraction == 0.75
    assert result.goodput_tokens_per_s == pytest.approx(9 / result.duration_s)
    assert result.errors == {"http 500": 1}
    strict = derive(load_config(replace(LOAD, slo=SloLimits(ttft_ms=700.0))), events)
    assert strict.slo_fraction == 0.0  # 250 ms from the send time would have held


def test_a_server_that_went_away_leaves_an_incomplete_run():
    refused = [replace(r, error="connect: Connection refused") for r in FOUR[2:]]
    result = derive(load_config(LOAD), [*FOUR[:2], *refused, OK])
    assert result.status == "incomplete"
    assert result.reason == "the server was gone after 2 of 4 requests: connect: Connection refused"
    back = derive(load_config(LOAD), [FOUR[0], *refused, FOUR[1], OK])
    assert (back.status, back.errors) == ("ok", {"connect": 2})
    busy = [replace(r, error="http 429: slow down") for r in FOUR[2:]]
    assert derive(load_config(LOAD), [*FOUR[:2], *busy, OK]).status == "ok"


def test_a_limit_on_gaps_looks_at_the_largest():
    gap = replace(FOUR[0], token_times=(0.75, 0.8, 0.95))
    assert load_metrics.holds(gap, SloLimits(itl_ms=151.0))
    assert not load_metrics.holds(gap, SloLimits(itl_ms=149.0))
    single = replace(gap, output_tokens=1, token_times=(0.75,))
    assert load_metrics.holds(single, SloLimits(itl_ms=1.0, tpot_ms=1.0))


def test_prompts_of_other_lengths_are_a_warning():
    assert "WRONG_INPUT_LENGTHS" in codes(derive(load_config(LOAD), [*FOUR, OK]))  # 10 tokens instead of 1000
    assert "WRONG_INPUT_LENGTHS" not in codes(derive(load_config(replace(LOAD, isl=40)), [*FOUR, OK]))
    assert "WRONG_INPUT_LENGTHS" not in codes(derive(load_config(replace(LOAD, turns=2)), [*FOUR, OK]))


@pytest.mark.parametrize(
    ("cached", "possible", "warned"),
    [(900, 0, True), (900, 850, False), (30, 0, False), (0, 0, False), (900, None, True), (400, None, False)],
)
def test_prompts_from_the_prefix_cache_that_share_none_are_a_warning(cached, possible, warned):
    requests = [replace(r, input_tokens=1000, cached_tokens=cached, cacheable_tokens=possible) for r in FOUR]
    assert ("PREFIX_CACHED" in codes(derive(load_config(LOAD), [*requests, OK]))) is warned


def test_repeats_on_a_server_have_prompts_of_their_own():
    config = load_config(LOAD)
    repeats = [repeat_of(config, number) for number in range(3)]
    assert [repeat.workload.seed for repeat in repeats] == [1234, 1235, 1236]
    prompts = {RequestSource(repeat.workload).session(0).turns[0].prompt for repeat in repeats}
    assert len(prompts) == 3


def test_a_late_client_has_no_verdict():
    honest = [request(n, float(n), float(n), 0.25) for n in range(4)]
    assert "CLIENT_LATE" not in codes(derive(load_config(LOAD), [*honest, OK]))
    late = derive(load_config(LOAD), [*FOUR, OK])
    assert late.status == "ok"
    assert "CLIENT_LATE" in codes(late)
    lag = ClientFacts(loop_lag_ms={"p50": 1.0, "p99": 40.0}, cpu_fraction=0.99)
    assert {"CLIENT_LATE", "CLIENT_BUSY"} <= codes(derive(load_config(LOAD), [*honest, lag, OK]))
    with_cap = replace(LOAD, concurrency=1)
    assert "CLIENT_LATE" not in codes(derive(load_config(with_cap), [*FOUR, OK]))  # the cap holds them, not the client


def test_prefix_hits_by_usage_or_by_counters_beside_the_possible():
    used = [replace(r, cached_tokens=4, cacheable_tokens=5) for r in FOUR]
    result = derive(load_config(LOAD), [*used, OK])
    assert (result.prefix_hit_rate, result.prefix_hit_rate_possible) == (0.4, 0.5)
    counted = ClientFacts(server_cache_queries=40.0, server_cache_hits=10.0)
    result = derive(load_config(LOAD), [*FOUR, counted, OK])
    assert result.prefix_hit_rate == 0.25
    assert result.prefix_hit_rate_possible is None


def test_a_result_and_a_configuration_survive_their_files():
    config = load_config(replace(LOAD, slo=SloLimits(ttft_ms=5.0)), gpus=2, gpu="h200", dtype="fp8")
    assert config_from_json(to_plain(config), "config.json") == config
    result = derive(config, [*FOUR, ClientFacts(processes=1), OK])
    assert build(Result, to_plain(result), "result.json") == result
    assert result.gpus == 2
    assert result.output_tokens_per_s_per_gpu == pytest.approx(result.output_tokens_per_s / 2)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=300))
def test_intervals_hold_their_estimates(samples):
    intervals = load_metrics.latency_intervals(samples)
    summary = metrics.latency_summary(samples)
    for name, (low, high) in intervals.items():
        assert low <= summary[name] * (1 + 1e-9)
        assert high >= summary[name] * (1 - 1e-9)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    from random import Random

    random, covered = Random(1), 0
    for _ in range(300):
        low, high = load_metrics.latency_intervals(random.random() for _ in range(400))["p90"]
        covered += low <= 0.9 <= high
    assert 0.92 <= covered / 300 <= 0.99


def test_lags_between_known_percentiles():
    points = load_metrics.lag_points({"p50": 1.0, "p99": 50.0})
    assert load_metrics.interpolate_lag(points, 0.25) == 0.5
    assert load_metrics.interpolate_lag(points, 0.999) == 50.0
    assert load_metrics.interpolate_lag(load_metrics.lag_points({}), 0.5) == 0.0


def test_slo_texts():
    assert parse_slo("ttft=500ms, TPOT=50,e2e=1.5s") == SloLimits(ttft_ms=500.0, tpot_ms=50.0, e2e_ms=1500.0)
    for text, message in (
        (" ", "no limit is given"),
        ("ttft=nan", "expected a time above 0"),
        ("ttft=-5ms", "expected a time above 0"),
        ("ttft=1,TTFT=2", "ttft has two limits"),
        ("ttft.p50=1", "unknown limit in the SLO: 'ttft.p50'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_slo(text)


def test_cost_and_energy_of_a_million_tokens():
    assert load_metrics.cost_per_million(3.6, 2, 1000.0) == pytest.approx(2.0)
    assert load_metrics.cost_per_million(3.6, None, 1000.0) is None
    assert load_metrics.joules_per_million(500.0, 1000) == 500_000


def test_percentiles_of_lags_with_odd_names_are_left_out():
    lags = {"p50": 1.0, "p²": 5.0, "p": 5.0, "p101": 5.0, "p0": 5.0, "mean": 5.0, "p99": 2.0}
    assert load_metrics.lag_points(lags) == [(0.0, 0.0), (0.5, 1.0), (0.99, 2.0)]
