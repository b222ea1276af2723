"""The report in trtllm-bench's layout: as printed there, readable by the same reader, nothing that is not known."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RequestDone, RunEnded, ServingFacts
from llmb.report.serving_overview import overview
from llmb.results.derive import derive
from llmb.results.readers.trtllm_log import read
from llmb.results.result import Result

OK = RunEnded(status="ok")
# As the document prints it.
LINES = """\
===========================================================
= PERFORMANCE OVERVIEW
===========================================================
Request Throughput (req/sec):                     0.4000
Total Output Throughput (tokens/sec):             2.0000
Total Token Throughput (tokens/sec):              6.0000
Total Latency (ms):                               10000.0000
Average request latency (ms):                     5000.0000
Per User Output Throughput [w/ ctx] (tps/user):   1.0000
Per GPU Output Throughput (tps/gpu):              2.0000
Average time-to-first-token [TTFT] (ms):          1000.0000
Average time-per-output-token [TPOT] (ms):        1000.0000
Per User Output Speed (tps/user):                 1.0000
"""


@pytest.fixture(scope="module")
def config(recipes):
    actual = resolve(recipes["inference_deepseek-r1"], RunRequest(size="671b", dtype="fp8", gpus=1, proxy="small"))
    work = replace(
        actual.workload, num_requests=4, concurrency=2, max_batch_size=2, max_num_tokens=192, kv_fraction=0.1
    )
    return replace(actual, workload=work)


def request(number, arrival, first, gap, tokens=5, inputs=10):
    times = tuple(first + gap * i for i in range(tokens))
    return RequestDone(
        request=number, arrival=arrival, first_token=first, token_times=times, end=times[-1],
        input_tokens=inputs, output_tokens=tokens, requested_tokens=tokens,
    )  # fmt: skip


PAIRS = [request(0, 0, 1, 1), request(1, 0, 1, 1), request(2, 5, 6, 1), request(3, 5, 6, 1)]


def read_back(text):
    *events, end = read(text.splitlines())
    assert end == OK
    return derive(None, [*events, end])


def test_the_block_is_laid_out_as_in_the_document(config):
    text = overview(derive(config, [*PAIRS, OK]), config)
    assert LINES in text
    for line in (
        "Number of requests:             4",
        "Number of concurrent requests:  2.0000",
        "Average Output Length (tokens): 5.0000",
        "TP Size:                1",
        "Max Runtime Tokens:     192",
        "KV Memory Percentage:   10.00%",
        "Issue Rate (req/sec):   0.6000",
        "[TTFT] P99    : 1000.0000",
        "[ITL] P50    : 1000.0000",
        "Steady Window (s):                                1.000 to 6.000, 50% of the run",
        "Steady Window Generation (tokens/sec):            2.0000",
        "Outputs of Requested Length:                      4 of 4",
    ):
        assert line in text.splitlines()
    heads = [line for line in text.splitlines() if line.startswith("= ")]
    assert heads[:3] == ["= REQUEST DETAILS", "= WORLD + RUNTIME INFORMATION", "= PERFORMANCE OVERVIEW"]


def test_without_streaming_the_lines_on_it_are_left_out(config):
    silent = replace(config, workload=replace(config.workload, streaming=False))
    text = overview(derive(silent, [*PAIRS, OK]), silent)
    assert LINES[: LINES.index("Average time-to")] in text
    assert not any(word in text for word in ("TTFT", "TPOT", "ITL", "Output Speed", "GTPS"))
    assert "[Latency] P50" in text
    assert read_back(text).ttft_ms is None


def test_a_run_that_did_not_end_well_has_no_report(config):
    assert overview(derive(config, [*PAIRS[:2], OK]), config) == ""
    assert overview(derive(config, [OK]), config) == ""
    wrong = [*PAIRS[:3], replace(PAIRS[3], requested_tokens=9)]
    assert overview(derive(config, [*wrong, OK]), config) == ""


def test_energy_says_whether_to_trust_it(config):
    facts = ServingFacts(energy_joules=100.0, power_joules=100.0, mean_power_w=10.0, weights_note="fp8 weights")
    lines = overview(derive(config, [facts, *PAIRS, OK]), config).splitlines()
    assert "Total Energy (J):                                 100.0000" in lines
    assert "Output Tokens per Second per Watt:                0.2000" in lines
    assert "Energy Counter:                                   agrees with sampled power" in lines
    none = overview(derive(config, [ServingFacts(energy_note="no NVML"), *PAIRS, OK]), config)
    assert "Energy Counter:                                   no NVML" in none
    assert "Total Energy" not in none


def test_requests_sent_all_at_once_have_no_rate(config):
    at_once = replace(config, workload=replace(config.workload, concurrency=4))
    text = overview(derive(at_once, [*(replace(r, arrival=0.0) for r in PAIRS), OK]), at_once)
    assert "Issue Rate (req/sec):   all at once" in text


WAVES = st.lists(
    st.tuples(st.floats(0, 50), st.floats(1e-4, 5), st.floats(1e-4, 3), st.integers(2, 20), st.integers(1, 9999)),
    min_size=4,
    max_size=12,
)


@pytest.mark.slow
@settings(deadline=None)  # the machine may be shared
@given(WAVES)
def test_the_reader_of_trtllm_logs_finds_the_same_figures(config, drawn):
    """Within what the printed digits can say."""
    done = [request(i, s, s + wait, gap, n, m) for i, (s, wait, gap, n, m) in enumerate(drawn)]
    result = derive(config, [*done, OK])
    actual = read_back(overview(result, config))
    compared = [f.name for f in fields(Result) if getattr(actual, f.name) is not None]
    figures = set(compared) - {"schema", "name", "status", "window", "log_problems", "versions", "warnings"}
    expected = {
        "requests", "input_tokens", "output_tokens", "duration_s", "request_throughput", "output_tokens_per_s",
        "total_tokens_per_s", "output_tokens_per_s_per_gpu", "output_tokens_per_s_per_user",
        "output_speed_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms",
    }  # fmt: skip
    assert expected <= figures
    for name in expected:
        figure, printed = getattr(result, name), getattr(actual, name)
        if isinstance(figure, dict):  # the report of trtllm-bench has fewer percentiles
            figure = {key: value for key, value in figure.items() if key in ("mean", "p50", "p90", "p95", "p99")}
        assert printed == pytest.approx(figure, rel=1e-4), name
