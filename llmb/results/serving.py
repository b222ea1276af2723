"""Inference figures: from our own requests one by one, or from the totals a foreign engine prints."""

from dataclasses import fields as dataclass_fields

from llmb import metrics
from llmb.events import RequestDone, ServingSummary
from llmb.results.result import Result

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def serving_fields(requests: list[RequestDone], gpus: int | None) -> dict:
    """Throughput over the span of the measured requests, latencies over those that succeeded."""
    measured = [r for r in requests if not r.warmup]
    good = [r for r in measured if r.error is None]
    found: dict = {"requests": len(good), "requests_failed": len(measured) - len(good)}
    if not good:
        return found
    duration = max(r.end for r in good) - min(r.arrival for r in good)
    found["duration_s"] = duration
    found |= {name: metrics.latency_summary(values) for name, values in _latencies(good).items()}
    if duration > 0:
        output = sum(r.output_tokens for r in good)
        found["request_throughput"] = len(good) / duration
        found["output_tokens_per_s"] = output / duration
        found["total_tokens_per_s"] = (output + sum(r.input_tokens for r in good)) / duration
        found["output_tokens_per_s_per_gpu"] = output / duration / gpus if gpus else None
    return found


def _latencies(requests: list[RequestDone]) -> dict[str, list[float]]:
    """Milliseconds by kind; what a request that was not streamed cannot tell is left out."""
    streamed = [r for r in requests if r.first_token is not None]
    gaps = [b - a for r in streamed for a, b in zip(r.token_times, r.token_times[1:], strict=False)]
    per_token = [
        (r.end - r.first_token) / (r.output_tokens - 1)
        for r in streamed
        if r.output_tokens > 1 and r.first_token is not None
    ]
    seconds = {
        "ttft_ms": [r.first_token - r.arrival for r in streamed if r.first_token is not None],
        "tpot_ms": per_token,
        "itl_ms": gaps,
        "e2e_ms": [r.end - r.arrival for r in requests],
    }
    return {name: [1000 * s for s in values] for name, values in seconds.items()}


def summary_fields(summary: ServingSummary) -> dict:
    """A foreign engine's totals by our names; `ttft_ms.p99` goes into the mapping `ttft_ms`."""
    known = {f.name for f in dataclass_fields(Result)}
    found: dict = {}
    for key, value in summary.values.items():
        name, dot, statistic = key.partition(".")
        if name not in known or value is None:
            continue
        if dot:
            found.setdefault(name, {})[statistic] = value
        else:
            found[name] = int(value) if name in ("requests", "requests_failed") else value
    return found
