"""The block that `vllm bench serve` prints (and SGLang's bench_serving after it):

    ============ Serving Benchmark Result ============
    Successful requests:                     100
    Mean TTFT (ms):                          12.34
    ==================================================

A log may hold a warm-up's block before the measured one: the last block is the result, whole or not, and how many were
left out is said. A block without its closing line was cut off.
"""

import math
from collections.abc import Iterable, Iterator

from llmb.events import Event, LogProblem, RunEnded, ServingSummary
from llmb.results.readers.log_ending import LogOutcome
from llmb.results.readers.log_fields import as_number, labelled

SIGNATURE = rb"Serving Benchmark Result"

_HEADER = SIGNATURE.decode()
_TOTALS = {
    "successful requests": "requests",
    "failed requests": "requests_failed",
    "maximum request concurrency": "concurrency",
    "max request concurrency": "concurrency",
    "benchmark duration": "duration_s",
    "total input tokens": "input_tokens",
    "total generated tokens": "output_tokens",
    "request throughput": "request_throughput",
    "output token throughput": "output_tokens_per_s",
    "total token throughput": "total_tokens_per_s",
}
_LATENCIES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms", "e2e latency": "e2e_ms"}
_STATISTICS = {"mean": "mean", "median": "p50", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
_KEYS = _TOTALS | {
    f"{statistic} {latency}": f"{name}.{short}"
    for latency, name in _LATENCIES.items()
    for statistic, short in _STATISTICS.items()
}
_LINE = labelled(_KEYS)


def read(lines: Iterable[bytes | str]) -> Iterator[Event]:
    """Yield the totals of the last block, then the outcome."""
    outcome, blocks, closed = LogOutcome("no result block"), 0, False
    values: dict[str, float | None] = {}
    for line in outcome.scanned(lines, (SIGNATURE,)):
        if _HEADER in line.text:
            blocks, closed, values = blocks + 1, False, {}
            outcome.every_line = True  # inside a block
        elif outcome.every_line and not line.text.strip().strip("="):
            outcome.every_line, closed = False, True
        elif outcome.every_line and (match := _LINE.match(line.text)):
            value = as_number(match[2])
            values[_KEYS[match[1].lower()]] = value if 0 <= value < math.inf else None
    if values:
        yield ServingSummary(values=values)
    if blocks > 1:
        yield LogProblem(problem="earlier result block left out as a warm-up", count=blocks - 1)
    if closed and values.get("requests") == 0:
        yield RunEnded(status="failed", reason="no request succeeded")
    elif blocks and not closed:
        yield from outcome.events(finished=False, unfinished="the last result block is cut off")
    else:
        yield from outcome.events(finished=closed and values.get("request_throughput") is not None)
