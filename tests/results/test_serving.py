"""Requests to a Result: worked examples, the plain formulas on random logs, all ranks, hard checks, warnings."""

import json
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import build, to_json
from llmb.events import RequestDone, RunEnded, ServingFacts, ServingSample, append, parse, read
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.result import Result

OK = RunEnded(status="ok")


@pytest.fixture(scope="module")
def config(recipes):
    """Four requests, two at a time, one after the other."""
    actual = resolve(recipes["inference_deepseek-r1"], RunRequest(size="671b", dtype="fp8", gpus=1, proxy="small"))
    return replace(actual, workload=replace(actual.workload, num_requests=4, concurrency=2, max_batch_size=2))


def with_work(config, **changes):
    return replace(config, workload=replace(config.workload, **changes))


def request(number, arrival, first, gap, tokens=5, requested=None, **more):
    """An answer whose first token comes at `first` and whose others follow every `gap` seconds."""
    times = tuple(first + gap * i for i in range(tokens))
    return RequestDone(
        request=number,
        arrival=arrival,
        first_token=first,
        token_times=times,
        end=times[-1],
        input_tokens=10,
        output_tokens=tokens,
        requested_tokens=tokens if requested is None else requested,
        **more,
    )


# Two at a time, five tokens each, a second apart: the second pair arrives when the first has ended.
PAIRS = [request(0, 0, 1, 1), request(1, 0, 1, 1), request(2, 5, 6, 1), request(3, 5, 6, 1)]


def codes(result):
    return {warning.code for warning in result.warnings}


def test_a_worked_example(config):
    result = derive(config, [*PAIRS, OK])
    assert result.status == "ok"
    assert (result.requests, result.requests_failed, result.lengths_wrong) == (4, 0, 0)
    assert (result.input_tokens, result.output_tokens) == (40, 20)
    assert result.duration_s == 10
    assert result.request_throughput == 0.4
    assert result.output_tokens_per_s == 2.0
    assert result.total_tokens_per_s == 6.0
    assert result.mean_concurrency == 2.0
    assert result.output_tokens_per_s_per_user == 1.0  # five tokens in five seconds, for each
    assert result.issue_rate_requests_per_s == pytest.approx(3 / 5)
    assert result.ttft_ms["p99"] == 1000
    assert result.tpot_ms["mean"] == 1000
    assert result.itl_ms["p50"] == 1000
    assert result.e2e_ms["mean"] == 5000
    assert result.output_speed_tokens_per_s == 1.0
    assert set(result.output_speed_summary_tokens_per_s) == {"mean", "p25", "p50", "p75", "p90", "p95", "p99"}
    assert set(result.output_speed_summary_tokens_per_s.values()) == {1.0}


def test_the_steady_window_leaves_out_the_first_prefill_and_the_drain(config):
    """From 1 s (two answers go on) to 6 s (the last begins): 4 + 4 decoded, 2 first tokens, over 5 s."""
    result = derive(config, [*PAIRS, OK])
    assert result.steady_window_s == (1, 6)
    assert result.steady_output_tokens_per_s == 2.0
    assert "NOT_STEADY" not in codes(result)


def test_a_slow_start_and_a_long_drain_lower_the_whole_run_only(config):
    """The first wave begins at 11 s, the last answer takes 5 s a token: the window is still 5 s with 10 tokens."""
    begun = [request(0, 0, 11, 1), request(1, 0, 11, 1), request(2, 15, 16, 1)]
    result = derive(config, [*begun, request(3, 15, 16, 5), OK])
    assert result.output_tokens_per_s == pytest.approx(20 / 36)
    assert result.steady_window_s == (11, 16)
    assert result.steady_output_tokens_per_s == 2.0
    longer = derive(config, [*begun, request(3, 15, 16, 10), OK])  # 5 of 56 s stand for nothing
    assert longer.output_tokens_per_s == pytest.approx(20 / 56)
    assert longer.steady_window_s is None


def test_one_wave_is_never_steady(config):
    result = derive(config, [request(i, 0, 1, 1) for i in range(4)] + [OK])
    assert result.steady_window_s is None
    assert result.steady_output_tokens_per_s is None
    assert {"NOT_STEADY", "FEW_REQUESTS"} & codes(result) == {"NOT_STEADY"}
    eight = with_work(config, max_batch_size=8, concurrency=4)
    assert {"NOT_STEADY", "FEW_REQUESTS"} <= codes(derive(eight, [request(i, 0, 1, 1) for i in range(4)] + [OK]))


def test_one_request_after_the_other_gives_whole_cycles(config):
    """First tokens at 1, 6, 11, 16 s: three cycles of five tokens in 15 s."""
    result = derive(config, [*(request(i, 5 * i, 5 * i + 1, 1) for i in range(4)), OK])
    assert result.steady_window_s == (1, 16)
    assert result.steady_output_tokens_per_s == 1.0


def test_an_arrival_may_carry_several_tokens(config):
    pairs = [replace(r, token_times=(r.first_token, r.first_token + 4), output_tokens=6) for r in PAIRS]
    result = derive(config, [*pairs, OK])
    assert result.steady_output_tokens_per_s == pytest.approx((2 * 3 + 2 * 3) / 5)


TIMES = st.floats(0, 100, allow_subnormal=False)
REQUESTS = st.lists(
    st.tuples(TIMES, TIMES, st.lists(st.floats(0.001, 10), max_size=8), st.integers(1, 1000)), min_size=1, max_size=20
)


@pytest.mark.slow
@settings(deadline=None)  # the machine may be shared
@given(REQUESTS)
def test_figures_equal_the_plain_formulas(config, drawn):
    """As in the table of trtllm-bench's formulas: s start, f first, e end, n output and m input tokens."""
    done = []
    for number, (s, wait, gaps, m) in enumerate(drawn):
        times = [s + 0.001 + wait]
        for gap in gaps:
            times.append(times[-1] + gap)
        done.append(
            RequestDone(
                request=number, arrival=s, first_token=times[0], token_times=tuple(times), end=times[-1],
                input_tokens=m, output_tokens=len(times),
            )
        )  # fmt: skip
    result = derive(config, [*done, OK])
    rows = [(r.arrival, r.first_token, r.end, r.output_tokens, r.input_tokens) for r in done]
    span = max(r.end for r in done) - min(r.arrival for r in done)
    assert result.duration_s == span
    assert result.request_throughput == pytest.approx(len(rows) / span)
    assert result.output_tokens_per_s == pytest.approx(sum(n for *_, n, _ in rows) / span)
    assert result.total_tokens_per_s == pytest.approx(sum(n + m for *_, n, m in rows) / span)
    assert result.output_tokens_per_s_per_gpu == pytest.approx(result.output_tokens_per_s)
    assert result.mean_concurrency == pytest.approx(sum(e - s for s, _, e, *_ in rows) / span)
    assert result.e2e_ms["mean"] == pytest.approx(1000 * mean(e - s for s, _, e, *_ in rows))
    assert result.ttft_ms["mean"] == pytest.approx(1000 * mean(f - s for s, f, *_ in rows))
    assert result.output_tokens_per_s_per_user == pytest.approx(mean(n / (e - s) for s, _, e, n, _ in rows))
    tpots = [(e - f) / (n - 1) for _, f, e, n, _ in rows if n > 1]
    assert (result.tpot_ms and result.tpot_ms["mean"]) == (pytest.approx(1000 * mean(tpots)) if tpots else None)
    speeds = [1 / tpot for tpot in tpots]
    assert result.output_speed_tokens_per_s == (pytest.approx(mean(speeds)) if speeds else None)
    if result.steady_window_s is not None:
        start, end = result.steady_window_s
        counted = sum(start < t <= end for r in done for t in r.token_times)
        assert result.steady_output_tokens_per_s == pytest.approx(counted / (end - start))
        assert end - start >= 0.1 * span
        assert max(r.first_token for r in done) == end


def test_requests_of_every_rank_count_and_warm_up_does_not(config):
    ranks = [replace(r, rank=r.request % 2) for r in PAIRS]
    warmup = [replace(r, warmup=True, output_tokens=1000) for r in PAIRS[:3]]
    result = derive(config, [*warmup, *ranks, OK])
    assert (result.requests, result.warmup_requests, result.output_tokens) == (4, 3, 20)
    assert result.output_tokens_per_s == 2.0


def test_without_streaming_nothing_is_said_of_first_tokens(config):
    silent = with_work(config, streaming=False)
    message = derive(silent, [*PAIRS, OK])
    untold = derive(silent, [*(replace(r, first_token=None, token_times=()) for r in PAIRS), OK])
    for result in (message, untold):
        assert result.ttft_ms is result.tpot_ms is result.itl_ms is None
        assert result.output_speed_tokens_per_s is result.output_speed_summary_tokens_per_s is None
        assert result.e2e_ms["mean"] == 5000
        assert result.output_tokens_per_s == 2.0
        assert "NOT_STEADY" not in codes(result)
        assert not any(word in summary(result) for word in ("TTFT", "TPOT", "ITL", "output speed"))
    assert message.steady_window_s == (1, 6)
    assert untold.steady_window_s is None


def test_an_answer_of_the_wrong_length_fails_the_run(config):
    short = [*PAIRS[:2], request(2, 5, 6, 1, tokens=3, requested=5), PAIRS[3]]
    result = derive(config, [*short, OK])
    assert (result.status, result.lengths_wrong) == ("failed", 1)
    assert result.reason == "1 of 4 outputs do not have the requested length: request 2 has 3 of 5 tokens"
    assert result.output_tokens_per_s is not None  # what was measured is kept
    may_stop = derive(with_work(config, ignore_eos=False), [*short, OK])
    assert (may_stop.status, may_stop.lengths_wrong) == ("ok", None)
    unknown = derive(config, [*(replace(r, requested_tokens=None) for r in short), OK])
    assert (unknown.status, unknown.lengths_wrong) == ("ok", None)
    warmup = derive(config, [replace(short[2], warmup=True), *PAIRS, OK])
    assert (warmup.status, warmup.lengths_wrong) == ("ok", 0)


def test_requests_that_are_missing_or_all_failed(config):
    assert derive(config, [*PAIRS[:3], OK]).reason == "3 of 4 requests are recorded"
    assert derive(config, [OK]).status == "incomplete"
    assert derive(config, [ServingFacts(requests=3), *PAIRS[:3], OK]).status == "ok"
    broken = [replace(r, error="no blocks") for r in PAIRS]
    result = derive(config, [*broken, OK])
    assert (result.status, result.requests, result.requests_failed) == ("failed", 0, 4)
    assert result.reason == "no request succeeded; the first ended with: no blocks"
    assert result.e2e_ms is result.output_tokens_per_s is None
    item = derive(config, [broken[0], *PAIRS[1:], OK])
    assert (item.status, item.requests, item.requests_failed) == ("ok", 3, 1)
    assert "FAILED_REQUESTS" in codes(item)


def test_a_worse_end_is_not_hidden_by_a_check(config):
    assert derive(config, [*PAIRS[:1], RunEnded(status="oom", reason="full")]).status == "oom"


GIB = 2**30


def test_facts_of_the_engine(config):
    first = ServingFacts(cache_bytes=2 * GIB, weight_bytes=GIB, weights_note="nvfp4 weights dequantised to bf16",
                         dequantised=True, warmup_requests=2, kv_blocks=10, graph_batches=(1, 2, 4))  # fmt: skip
    last = ServingFacts(peak_memory_bytes=5 * GIB, energy_joules=50.0, power_joules=51.0, mean_power_w=5.0)
    samples = [
        ServingSample(elapsed_s=1.0, done=0, blocks_used=9, blocks=10, warmup=True),
        ServingSample(elapsed_s=1.0, done=1, blocks_used=3, blocks=10),
        ServingSample(elapsed_s=2.0, done=1, blocks_used=7, blocks=10),
        ServingSample(elapsed_s=3.0, done=4),
    ]
    result = derive(config, [first, *samples, *PAIRS, last, OK])
    assert (result.kv_cache_gib, result.weights_gib, result.peak_memory_gib, result.kv_peak_use) == (2, 1, 5, 0.7)
    assert (result.energy_joules, result.energy_valid, result.mean_power_w) == (50.0, True, 5.0)
    assert result.output_tokens_per_joule == 20 / 50
    assert result.warmup_requests == 2
    assert result.weights_note == "nvfp4 weights dequantised to bf16"
    assert "DEQUANTISED" in codes(result)
    assert build(Result, json.loads(to_json(result))) == result
    for word in ("KV cache", "70 % of it used", "tokens/J", "output, steady", "output, whole run"):
        assert word in summary(result)


def test_energy_is_of_all_gpus_or_of_none(config):
    two = replace(config, machine=replace(config.machine, gpus=2))
    facts = [
        ServingFacts(rank=rank, energy_joules=50.0, power_joules=joules) for rank, joules in ((0, 50.0), (1, 40.0))
    ]
    result = derive(two, [*facts, *PAIRS, OK])
    assert (result.energy_joules, result.energy_valid, result.mean_power_w) == (100.0, False, None)
    assert "which sampled power contradicts" in summary(result)
    assert derive(two, [*facts[:1], *PAIRS, OK]).energy_joules is None
    note = derive(config, [ServingFacts(energy_note="no NVML"), *PAIRS, OK])
    assert (note.energy_joules, note.energy_valid, note.output_tokens_per_joule) == (None, None, None)
    assert note.energy_note == "no NVML"
    unchecked = derive(config, [ServingFacts(energy_joules=5.0), *PAIRS, OK])
    assert (unchecked.energy_joules, unchecked.energy_valid) == (5.0, None)


def test_what_is_not_recorded_is_null(config):
    result = derive(config, [*PAIRS, OK])
    assert result.kv_cache_gib is result.kv_peak_use is result.weights_note is result.energy_joules is None
    assert result.warmup_requests is result.warmup_s is result.peak_memory_gib is None


def test_warnings_of_a_load(config):
    assert codes(derive(config, [*PAIRS, OK])) == {"PROXY", "RANDOM_ROUTING"}
    cached = with_work(config, prefix_cache=True, weights="/some/folder")
    assert codes(derive(cached, [*PAIRS, OK])) == {"PROXY", "PREFIX_CACHE_ON"}


def test_a_late_client_is_named(config):
    """Of two at a time one is missing for 5 of 15 s: a sixth of the load."""
    late = [*PAIRS[:3], request(3, 10, 11, 1)]
    (output,) = [w.text for w in derive(config, [*late, OK]).warnings if w.code == "CLIENT_BOUND"]
    assert output.startswith("17 % of the load was missing")
    at_once = with_work(config, concurrency=4)
    assert "CLIENT_BOUND" in codes(derive(at_once, [*PAIRS, OK]))
    assert "CLIENT_BOUND" not in codes(derive(at_once, [*(replace(r, arrival=0.0) for r in PAIRS), OK]))


def test_new_events_survive_the_file_and_old_lines_are_still_read(tmp_path):
    path = tmp_path / "events.rank0.jsonl"
    written = [PAIRS[0], ServingSample(elapsed_s=1.0, done=2), ServingFacts(graph_batches=(1, 2)), ServingFacts()]
    for event in written:
        append(path, event)
    assert list(read(path)) == written
    old = parse('{"event": "RequestDone", "request": 1, "arrival": 0, "end": 1, "input_tokens": 2, "output_tokens": 3}')
    assert (old.rank, old.requested_tokens, old.finish) == (0, None, None)
