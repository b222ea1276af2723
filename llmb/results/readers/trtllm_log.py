"""The report of trtllm-bench: the lines under `= PERFORMANCE OVERVIEW`, and the `= REQUEST DETAILS` before it.

Without streaming the lines on first token, time per token and output speed are missing, and stay null. Of several
reports in one log the last counts. "Number of concurrent requests" is the mean concurrency and not the
limit that was set, so it is not taken for the concurrency.
"""

import math
import re
from collections.abc import Iterable, Iterator

from llmb.events import Event, LogProblem, ServingSummary
from llmb.results.readers.log_ending import LogOutcome
from llmb.results.readers.log_fields import NUMBER, as_number, labelled

SIGNATURE = rb"PERFORMANCE OVERVIEW"

_HEADER = SIGNATURE.decode()
# One of these is in every line below; without first letters, whose case differs between versions.
_WORDS = (SIGNATURE, b"equest", b"verage", b"hroughput", b"atency", b"utput", b"TTFT", b"TPOT")
_OVERVIEW = {
    "request throughput": "request_throughput",
    "total output throughput": "output_tokens_per_s",
    "total token throughput": "total_tokens_per_s",
    "total latency": "total_latency_ms",
    "average request latency": "e2e_ms.mean",
    "per user output throughput": "output_tokens_per_s_per_user",
    "per gpu output throughput": "output_tokens_per_s_per_gpu",
    "average time-to-first-token": "ttft_ms.mean",
    "average time-per-output-token": "tpot_ms.mean",
    "per user output speed": "output_speed_tokens_per_s",
}
_DETAILS = {"number of requests": "requests", "average input length": "input", "average output length": "output"}
_ALWAYS = {"request_throughput", "output_tokens_per_s", "total_latency_ms", "output_tokens_per_s_per_gpu"}
_OVERVIEW_LINE = labelled(_OVERVIEW)
_DETAILS_LINE = labelled(_DETAILS)
_BREAKDOWN_LINE = re.compile(rf"\[(TTFT|TPOT|Latency)\]\s+(P50|P90|P95|P99)\s*:\s*{NUMBER}(?![\w.])", re.IGNORECASE)
_BREAKDOWN = {"ttft": "ttft_ms", "tpot": "tpot_ms", "latency": "e2e_ms"}


def read(lines: Iterable[bytes | str]) -> Iterator[Event]:
    """Yield the totals of the last report, then the outcome."""
    outcome, reports = LogOutcome("no performance overview"), 0
    details: dict[str, float | None] = {}
    values: dict[str, float | None] = {}
    for line in outcome.scanned(lines, _WORDS):
        if _HEADER in line.text:
            reports += 1
            values, details = _requested(details), {}
        elif match := _DETAILS_LINE.search(line.text):
            details[_DETAILS[match[1].lower()]] = _sane(match[2])
        elif reports and (match := _OVERVIEW_LINE.search(line.text)):
            values[_OVERVIEW[match[1].lower()]] = _sane(match[2])
        elif reports and (match := _BREAKDOWN_LINE.search(line.text)):
            values[f"{_BREAKDOWN[match[1].lower()]}.{match[2].lower()}"] = _sane(match[3])
    latency = values.get("total_latency_ms")
    if latency is not None:
        values["duration_s"] = latency / 1000
    if values:
        yield ServingSummary(values=values)
    if reports > 1:
        yield LogProblem(problem="earlier report left out as a warm-up", count=reports - 1)
    finished = all(values.get(name) is not None for name in _ALWAYS)
    yield from outcome.events(finished, unfinished="the last report is cut off" if reports else None)


def _requested(details: dict[str, float | None]) -> dict[str, float | None]:
    """Return totals of requests and tokens; the report gives tokens as means over requests."""
    requests = details.get("requests")
    if requests is None:
        return {}
    totals: dict[str, float | None] = {"requests": requests}
    for name in ("input", "output"):
        mean = details.get(name)
        if mean is not None:
            totals[f"{name}_tokens"] = float(round(mean * requests))
    return totals


def _sane(text: str) -> float | None:
    value = as_number(text)
    return value if 0 <= value < math.inf else None
