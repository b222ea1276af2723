"""Inference figures: from our own requests one by one, or from the totals a foreign engine prints."""

from dataclasses import fields as dataclass_fields

from llmb import metrics
from llmb.events import RequestDone, ServingSummary
from llmb.results.result import Result

RATES = (
    "duration_s",
    "request_throughput",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "output_tokens_per_s_per_user",
)


def serving_fields(requests: list[RequestDone], gpus: int | None) -> dict:
    """Throughput over the span of the measured requests, latencies over those that succeeded."""
    measured = [r for r in requests if not r.warmup]
    good = [r for r in measured if r.error is None]
    found: dict = {"requests": len(good), "requests_failed": len(measured) - len(good)}
    found |= {name: metrics.latency_summary(samples) for name, samples in metrics.latencies_ms(good).items()}
    speeds = [speed for speed in map(metrics.output_speed, good) if speed is not None]
    found["output_speed_tokens_per_s"] = sum(speeds) / len(speeds) if speeds else None
    rates = metrics.throughput(good)
    if rates is not None:
        found |= {name: getattr(rates, name) for name in RATES}
        found["output_tokens_per_s_per_gpu"] = rates.output_tokens_per_s / gpus if gpus else None
    return found


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
