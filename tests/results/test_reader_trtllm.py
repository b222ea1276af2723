"""trtllm-bench reports, with streaming and without."""

from pathlib import Path

import pytest

from llmb.events import LogProblem, RunEnded, ServingSummary
from llmb.results.readers.reader_choice import read_log
from llmb.results.readers.trtllm_log import read

LOGS = Path(__file__).parent.parent / "golden" / "logs"


def test_every_printed_figure_has_its_name():
    summary, end = read_log(LOGS / "trtllm.out")
    assert end == RunEnded(status="ok")
    assert summary.values == {
        "requests": 30720,
        "input_tokens": 30_720_000,
        "output_tokens": 30_720_000,
        "duration_s": pytest.approx(1043.7902634),
        "request_throughput": 29.4312,
        "output_tokens_per_s": 29431.2,
        "total_tokens_per_s": 58862.4,
        "total_latency_ms": 1043790.2634,
        "e2e_ms.mean": 103330.912,
        "output_tokens_per_s_per_user": 9.8012,
        "output_tokens_per_s_per_gpu": 7357.8,
        "ttft_ms.mean": 8123.4471,
        "tpot_ms.mean": 95.3027,
        "output_speed_tokens_per_s": 10.521,
        "ttft_ms.p50": 4011.552,
        "ttft_ms.p90": 24870.0031,
        "ttft_ms.p95": 27511.9083,
        "ttft_ms.p99": 29612.44,
        "tpot_ms.p50": 96.0141,
        "tpot_ms.p90": 98.221,
        "tpot_ms.p95": 98.9001,
        "tpot_ms.p99": 99.7003,
        "e2e_ms.p50": 101920.1133,
        "e2e_ms.p90": 118200.2204,
        "e2e_ms.p95": 121190.7755,
        "e2e_ms.p99": 125001.9001,
    }


def test_without_streaming_three_lines_are_missing_and_the_last_report_counts():
    summary, problem, end = read_log(LOGS / "trtllm_no_streaming.out")
    assert isinstance(summary, ServingSummary)
    assert summary.values["requests"] == 30720
    assert summary.values["output_tokens_per_s"] == 32374.32
    assert not {"ttft_ms.mean", "tpot_ms.mean", "output_speed_tokens_per_s"} & summary.values.keys()
    assert problem == LogProblem(problem="earlier report left out as a warm-up")
    assert end == RunEnded(status="ok")


def test_a_report_cut_in_the_middle_is_incomplete_and_keeps_what_is_there():
    lines = (LOGS / "trtllm.out").read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if line.startswith("Total Latency"))
    summary, end = read(lines[:cut])
    assert summary.values["total_tokens_per_s"] == 58862.4
    assert end == RunEnded(status="incomplete", reason="the last report is cut off")


def test_labels_of_older_releases():
    summary, _ = read(
        ["= PERFORMANCE OVERVIEW", "Per User Output Speed [1/TPOT] (tps/user): 5.4656", "Total Latency (ms): N/A"]
    )
    assert summary.values == {"output_speed_tokens_per_s": 5.4656}
