"""Whole loads on the no-op server, from settings to a Result."""

import asyncio
import os
import time
from dataclasses import replace
from time import perf_counter

import pytest

from llmb.config.load_settings import LoadSettings, SloLimits, load_config
from llmb.errors import ConfigError, LaunchError
from llmb.events import ClientFacts, RequestDone, RunEnded, ServingFacts
from llmb.loadgen.calibration import Calibration, NoopServerProcess, choose_processes
from llmb.loadgen.load_test import api_key_of, run_load
from llmb.loadgen.load_worker import LoadWorker
from llmb.loadgen.request_source import RequestSource
from llmb.results.derive import derive


@pytest.fixture(scope="module")
def server():
    with NoopServerProcess("--ttft-ms", "4", "--itl-ms", "1") as process:
        yield process.url


@pytest.fixture(scope="module")
def slow_server():
    """Long between tokens, so that a client that gets no CPU for a while still does not read all of them at once."""
    with NoopServerProcess("--ttft-ms", "4", "--itl-ms", "30") as process:
        yield process.url


def settings(url: str, **changes) -> LoadSettings:
    fields = {"base_url": url, "model": "noop", "isl": 12, "osl": 5, "concurrency": 8, "num_requests": 24}
    return LoadSettings(**fields | {"calibrate": False, "ready_timeout_s": 5.0} | changes)


def run(load: LoadSettings):
    events: list = []
    outcome = run_load(load, events.append, lambda line: None)
    return outcome, [e for e in events if isinstance(e, RequestDone)], derive(load_config(load), events), events


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_closed_loop(slow_server, endpoint, streaming):
    load = settings(slow_server, endpoint=endpoint, streaming=streaming, warmup_requests=3)
    outcome, requests, result, _ = run(load)
    assert outcome.status == result.status == "ok"
    assert (result.requests, result.requests_failed, result.warmup_requests) == (24, 0, 3)
    assert (result.input_tokens, result.output_tokens, result.lengths_wrong) == (24 * 12, 24 * 5, 0)
    assert result.tokens_counted_by == "usage"
    assert {r.request for r in requests if not r.warmup} == set(range(24))
    for request in requests:
        assert request.scheduled <= request.arrival <= request.first_byte <= request.end
        assert len(request.token_times) == (5 if streaming else 0)
    if streaming:
        assert result.ttft_ms["p50"] >= 4
        assert result.tpot_ms["p50"] > 0
        assert result.tokens_per_chunk == 1.0
    else:
        assert result.ttft_ms is None
        assert result.e2e_ms["p50"] >= 8


def test_two_processes_share_one_clock_and_all_requests(server):
    _, requests, result, events = run(settings(server, processes=2, concurrency=6, num_requests=31))
    assert sorted(r.request for r in requests) == list(range(31))
    assert result.mean_concurrency <= 6.01
    assert min(r.scheduled for r in requests) >= 0
    assert next(e for e in events if isinstance(e, ClientFacts)).processes == 2


@pytest.mark.parametrize("key", ["secret\nX-Other: 1", "secret\x00", "\u4e2d"])
def test_a_key_that_no_header_takes_is_refused_without_printing_it(monkeypatch, key):
    monkeypatch.setattr(os, "environ", {"KEY": key, "FROM_A_FILE": "secret\r\n"})
    with pytest.raises(ConfigError) as caught:
        api_key_of(settings("http://h", api_key_env="KEY"))
    assert "secret" not in str(caught.value)
    assert api_key_of(settings("http://h", api_key_env="FROM_A_FILE")) == "secret"


def test_a_client_is_never_busier_than_its_core(server):
    _, _, result, _ = run(settings(server, model="fault:500", num_requests=1, concurrency=1))
    assert result.client["cpu_fraction"] < 1.2  # of a ms; its head start is no part of it


def test_whole_responses_without_usage_have_unknown_tokens(server):
    _, requests, result, _ = run(settings(server, model="fault:no-usage", streaming=False, slo=SloLimits(e2e_ms=1e6)))
    assert {r.counted_by for r in requests} == {"nobody"}
    assert (result.status, result.requests, result.goodput_requests_per_s) == ("ok", 24, result.request_throughput)
    assert result.output_tokens is result.output_tokens_per_s is result.total_tokens_per_s is None
    assert result.lengths_wrong is result.goodput_tokens_per_s is result.output_tokens_per_s_per_user is None
    assert "NO_USAGE" in {warning.code for warning in result.warnings}
    assert result.e2e_ms["p50"] > 0


def test_a_rate_keeps_its_times_and_a_cap_shows_the_waiting(server):
    load = settings(server, arrivals="constant", rate=200.0, concurrency=None, num_requests=30)
    _, requests, _, _ = run(load)
    assert sorted(r.scheduled for r in requests) == pytest.approx([n / 200 for n in range(30)], abs=1e-5)
    assert all(r.arrival >= r.scheduled for r in requests)
    _, requests, held, _ = run(replace(load, concurrency=1))
    assert held.mean_concurrency <= 1.01
    assert max(r.arrival - r.scheduled for r in requests) > 0.05  # 30 x 8 ms, one after the other, in 145 ms
    waits = [1000 * (r.arrival - r.scheduled) for r in requests]
    mean = sum(waits) / len(waits)
    assert held.ttft_scheduled_ms["mean"] == pytest.approx(held.ttft_ms["mean"] + mean)  # no coordinated omission
    assert "RATE_MISSED" in {warning.code for warning in held.warnings}


def test_a_closed_loop_without_a_count_renders_before_it_sends(server, monkeypatch):
    begin, rendered = LoadWorker._begin, []

    def watched(self, number, due):
        rendered.append(number in self._rendered)
        begin(self, number, due)

    monkeypatch.setattr(LoadWorker, "_begin", watched)

    async def load() -> int:
        parsed = settings(server, num_requests=None, duration_s=0.2, concurrency=2)
        worker = LoadWorker(asyncio.get_running_loop(), parsed, RequestSource(parsed))
        await worker.prepare()
        await worker.run(perf_counter())
        worker.close()
        return worker.done

    assert asyncio.run(load()) == len(rendered) > 4
    assert all(rendered)


def test_a_duration_ends_the_load_and_waits_for_the_last_responses(server):
    outcome, requests, result, _ = run(settings(server, num_requests=None, duration_s=0.3, concurrency=3))
    assert outcome.status == result.status == "ok"
    assert 3 <= len(requests) < 300
    assert all(r.scheduled < 0.3 and r.error is None for r in requests)


def test_sessions_send_their_history(server):
    load = settings(server, turns=3, num_requests=12, concurrency=4, think_s=0.02, endpoint="chat")
    _, requests, result, _ = run(load)
    assert result.requests == 12
    by_session = {(r.session, r.turn): r for r in requests}
    for session in range(4):
        first, second, third = (by_session[session, turn] for turn in range(3))
        assert second.scheduled == pytest.approx(first.end + 0.02, abs=1e-4)
        assert first.input_tokens < second.input_tokens < third.input_tokens
        assert second.cacheable_tokens == first.input_tokens + first.output_tokens
    assert result.prefix_hit_rate_possible > 0.4
    assert result.prefix_hit_rate == 0.0


def test_a_trace_is_replayed(server, tmp_path):
    path = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:17:0{n}.0000000,{10 + n},{n + 1}\n" for n in range(4))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    load = settings(server, trace=str(path), trace_speedup=20.0, arrivals="trace", concurrency=None, num_requests=None)
    _, requests, _, _ = run(load)
    assert [round(r.scheduled, 3) for r in sorted(requests, key=lambda r: r.request)] == [0.0, 0.05, 0.1, 0.15]
    assert {(r.input_tokens, r.output_tokens) for r in requests} == {(10 + n, n + 1) for n in range(4)}


def test_goodput_and_cost(server):
    load = settings(server, slo=SloLimits(ttft_ms=1000.0, tpot_ms=100.0), gpu_cost_per_hour=3.6)
    events: list = []
    run_load(load, events.append, lambda line: None)
    result = derive(load_config(load, gpus=2), events)
    assert result.slo_fraction == 1.0
    assert result.goodput_requests_per_s == pytest.approx(result.request_throughput)
    assert result.cost_per_million_output_tokens == pytest.approx(2000 / result.output_tokens_per_s)
    strict = derive(load_config(replace(load, slo=SloLimits(ttft_ms=0.001))), events)
    assert strict.slo_fraction == strict.goodput_requests_per_s == 0.0
    assert result.latency_intervals_ms["ttft_ms"]["mean"][0] < result.ttft_ms["mean"]


@pytest.mark.parametrize(
    ("fault", "name", "text"),
    [
        ("500", "http 500", "out of luck"),
        ("truncated", "truncated", "the connection ended in the response"),
        ("error", "stream error", "engine died"),
        ("close", "disconnected", ""),
    ],
)
def test_failures_have_names_and_end_a_hopeless_load(server, fault, name, text):
    outcome, requests, result, _ = run(settings(server, model=f"fault:{fault}", num_requests=300))
    assert {r.error.partition(":")[0] for r in requests} == {name}
    assert all(text in r.error for r in requests)
    assert outcome.status == result.status == "failed"
    assert outcome.reason.startswith("the first 100 requests all failed")
    assert set(result.errors) == {name}


def test_timeouts_are_recorded(server):
    outcome, requests, result, _ = run(settings(server, model="fault:silent", num_requests=4, timeout_s=0.3))
    assert {r.error for r in requests} == {"timeout: no end within 0.3 s"}
    assert result.status == "failed"
    assert outcome.status == "ok"  # the load was sent; the Result says that nothing came back


def test_other_lengths_and_missing_usage_are_warnings(server):
    _, _, short, _ = run(settings(server, model="fault:short", osl=8))
    assert (short.status, short.lengths_wrong, short.output_tokens) == ("ok", 24, 24 * 4)
    assert "WRONG_LENGTHS" in {warning.code for warning in short.warnings}
    _, _, silent, _ = run(settings(server, model="fault:no-usage"))
    assert silent.tokens_counted_by == "chunks"
    assert silent.output_tokens == 24 * 5
    assert "NO_USAGE" in {warning.code for warning in silent.warnings}


def test_wrong_requests_are_refused_before_anything_is_sent(server):
    with pytest.raises(ConfigError, match=r"unknown model at .*: 'other'; choices are: noop"):
        run(settings(server, model="other"))
    with pytest.raises(LaunchError, match=r"no server is ready at http://127.0.0.1:1 after 0.1 s: Connection refused"):
        run(settings("http://127.0.0.1:1", ready_timeout_s=0.1))
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        run(settings(server, api_key_env="NO_SUCH_KEY"))
    with pytest.raises(ConfigError, match="cannot read the dataset /none"):
        run(settings(server, dataset="/none"))


def test_an_interruption_keeps_what_was_measured(server):
    events: list = []

    def interrupt(event):
        events.append(event)
        if len(events) == 20:
            raise KeyboardInterrupt

    load = settings(server, num_requests=None, duration_s=60.0)
    start = time.monotonic()
    outcome = run_load(load, interrupt, lambda line: None)
    assert time.monotonic() - start < 20
    assert outcome.interrupted
    assert isinstance(events[-1], RunEnded)
    result = derive(load_config(load), events)
    assert result.status == "incomplete"
    assert result.reason.startswith("interrupted after")
    assert result.requests >= 10


def test_warm_up_is_timed_apart(server):
    _, _, result, events = run(settings(server, warmup_requests=4))
    facts = next(e for e in events if isinstance(e, ServingFacts))
    assert facts.warmup_requests == 4
    assert result.warmup_s > 0


def test_processes_follow_the_load():
    cost = Calibration(50.0, 2.0, 0.1, 0.2, 1e4, 2e5)
    cores = choose_processes(settings("http://h", arrivals="poisson", rate=1e6, concurrency=None), cost)
    assert cores >= 1
    assert choose_processes(settings("http://h", arrivals="poisson", rate=10.0, concurrency=None), cost) == 1
    assert choose_processes(settings("http://h", concurrency=1), cost) == 1
    assert choose_processes(settings("http://h"), None) == 1
