"""vLLM's serving block: a warm-up's block may stand before the measured one."""

from pathlib import Path

from llmb.events import LogProblem, RunEnded
from llmb.results.readers.reader_choice import read_log
from llmb.results.readers.vllm_log import read

LOGS = Path(__file__).parent.parent / "golden" / "logs"


def test_the_last_block_is_the_result():
    summary, problem, end = read_log(LOGS / "vllm.log")
    values = summary.values
    assert (values["requests"], values["requests_failed"], values["concurrency"]) == (640, 0, 64)
    assert (values["duration_s"], values["input_tokens"], values["output_tokens"]) == (84.12, 655360, 81920)
    assert values["request_throughput"] == 7.61
    assert values["output_tokens_per_s"] == 973.85
    assert values["total_tokens_per_s"] == 8764.62
    for latency in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert {key for key in values if key.startswith(latency)} == {
            f"{latency}.{statistic}" for statistic in ("mean", "p50", "p90", "p99")
        }
    assert values["ttft_ms.p99"] == 96.49
    assert problem == LogProblem(problem="earlier result block left out as a warm-up")
    assert end == RunEnded(status="ok")


def test_a_measured_block_cut_off_is_not_replaced_by_the_warm_up():
    text = (LOGS / "vllm.log").read_text()
    summary, _, end = read(text[: text.rindex("Mean TPOT")].splitlines())
    assert summary.values["requests"] == 640
    assert "tpot_ms.mean" not in summary.values
    assert end == RunEnded(status="incomplete", reason="the last result block is cut off")


def test_labels_of_sglang():
    summary, _ = read(
        [
            "============ Serving Benchmark Result ============",
            "Max request concurrency:                 8",
            "Request throughput (req/s):              1.50",
            "Total token throughput (tok/s):          1,234.5",
            "Mean E2E Latency (ms):                   17.0",
            "=" * 50,
        ]
    )
    assert summary.values == {
        "concurrency": 8,
        "request_throughput": 1.5,
        "total_tokens_per_s": 1234.5,
        "e2e_ms.mean": 17,
    }


def test_a_benchmark_in_which_every_request_failed_has_failed():
    lines = ["== Serving Benchmark Result ==", "Successful requests: 0", "Request throughput (req/s): 0.00", "=" * 50]
    assert list(read(lines))[-1] == RunEnded(status="failed", reason="no request succeeded")
