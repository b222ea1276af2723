"""Figures that only a load on a server has: scheduled-time latency, goodput, errors by name, cache, cost, the client.

Runs of the native engine have some of them too: goodput where the run has an SLO, scheduled times where it has a rate.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmb.config.load_settings import LoadSettings, SloLimits, load_settings_of, parse_slo
from llmb.config.spec import Inference, RunConfig
from llmb.events import ClientFacts, Event, RequestDone
from llmb.perfmodel import load_metrics, metrics
from llmb.results.recorded_events import completed_requests, events_of


def client_facts(events: Sequence[Event]) -> ClientFacts | None:
    """Return what the load generator recorded of itself; None of a run without one."""
    return next(reversed(events_of(events, ClientFacts)), None)


def slo_of(config: RunConfig | None) -> SloLimits | None:
    """Return the service-level objective of a run."""
    load = load_settings_of(config)
    if load is not None:
        return load.slo
    work = config.workload if config is not None else None
    return parse_slo(work.slo) if isinstance(work, Inference) and work.slo else None


def load_fields(
    events: Sequence[Event],
    config: RunConfig | None,
    requests: Sequence[RequestDone],
    latencies: Mapping[str, Sequence[float]],
    fields: dict,
) -> dict:
    """Return the fields that follow from the measured requests; `latencies` and `fields`: those of serving_figures."""
    completed = completed_requests(events)
    figures: dict[str, Any] = {"latency_intervals_ms": _intervals(latencies)}
    if any(r.scheduled is not None for r in completed):
        figures["ttft_scheduled_ms"] = _summary(load_metrics.scheduled_ttft_ms, completed)
        figures["e2e_scheduled_ms"] = _summary(load_metrics.scheduled_e2e_ms, completed)
        users = _summary(load_metrics.scheduled_user_throughput, completed)
        figures["output_tokens_per_s_per_user_scheduled"] = users and users["mean"]
    if any(r.first_byte is not None for r in completed):
        waits = [(r.first_byte - r.arrival) * 1000 for r in completed if r.first_byte is not None]
        figures["first_byte_ms"] = metrics.latency_summary(waits)
    figures["errors"] = dict(Counter(_error_name(r.error) for r in requests if r.error is not None).most_common())
    figures |= _goodput(config, completed, len(requests) - len(completed), fields.get("duration_s"))
    figures |= _cache(events, completed) | _cost(config, fields) | _counts(completed)
    client = client_facts(events)
    if client is not None:
        figures["client"] = {name: value for name, value in asdict(client).items() if value is not None}
    return figures


def _summary(figure: Any, requests: Sequence[RequestDone]) -> dict[str, float] | None:
    return metrics.latency_summary(value for value in map(figure, requests) if value is not None)


def _intervals(latencies: Mapping[str, Sequence[float]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return intervals of the latencies that each request has once; gaps between tokens depend on one another."""
    intervals = {name: load_metrics.latency_intervals(values) for name, values in latencies.items()}
    return {name: interval for name, interval in intervals.items() if interval is not None}


def _error_name(error: str | None) -> str:
    """Return the kind of an error: connect, timeout, http 503, truncated, ..."""
    name = (error or "").partition(":")[0].strip()
    return name if 0 < len(name) <= 40 else "other"


def _goodput(config: RunConfig | None, completed: Sequence[RequestDone], failed: int, duration_s: Any) -> dict:
    limits = slo_of(config)
    if limits is None:
        return {}
    figures: dict[str, Any] = {"slo": {name: value for name, value in asdict(limits).items() if value is not None}}
    good = load_metrics.goodput(completed, failed, limits, duration_s)
    if good is not None:
        tokens_per_s = None if any(r.counted_by == "nobody" for r in completed) else good.tokens_per_s
        figures |= {"goodput_requests_per_s": good.requests_per_s, "goodput_tokens_per_s": tokens_per_s}
        figures["slo_fraction"] = good.fraction
    return figures


def _cache(events: Sequence[Event], completed: Sequence[RequestDone]) -> dict:
    """Return the hit rate of the prefix cache: measured by the server, and possible for these requests."""
    figures: dict[str, Any] = {}
    client = client_facts(events)
    reported = [r for r in completed if r.cached_tokens is not None and r.input_tokens]
    if reported:
        hits = sum(r.cached_tokens or 0 for r in reported)
        figures["prefix_hit_rate"] = hits / sum(r.input_tokens for r in reported)
        figures["prefix_hit_source"] = "usage of each response"
    elif client is not None and client.server_cache_queries:
        figures["prefix_hit_rate"] = (client.server_cache_hits or 0.0) / client.server_cache_queries
        figures["prefix_hit_source"] = "counters of the server, other clients included"
    shared = [r for r in completed if r.cacheable_tokens is not None and r.input_tokens]
    if shared and len(shared) == len(completed):
        figures["prefix_hit_rate_possible"] = sum(r.cacheable_tokens or 0 for r in shared) / sum(
            r.input_tokens for r in shared
        )
    return figures


def _cost(config: RunConfig | None, fields: dict) -> dict:
    load: LoadSettings | None = load_settings_of(config)
    gpus = config.machine.gpus if config is not None else None
    per_hour = load.gpu_cost_per_hour if load is not None else None
    return {
        "cost_per_million_output_tokens": load_metrics.cost_per_million(
            per_hour, gpus, fields.get("output_tokens_per_s")
        ),
        "cost_per_million_tokens": load_metrics.cost_per_million(per_hour, gpus, fields.get("total_tokens_per_s")),
        "joules_per_million_output_tokens": load_metrics.joules_per_million(
            fields.get("energy_joules"), fields.get("output_tokens")
        ),
    }


def _counts(completed: Sequence[RequestDone]) -> dict:
    """Return who counted the output tokens, and where the client's tokenizer disagrees."""
    sources = {r.counted_by for r in completed}
    figures: dict[str, Any] = {}
    if sources - {None}:
        figures["tokens_counted_by"] = ", ".join(sorted(source for source in sources if source is not None))
    checked = [r for r in completed if r.client_tokens is not None]
    if checked:
        figures["token_counts_wrong"] = sum(r.client_tokens != r.output_tokens for r in checked)
    if "usage" in sources and (chunks := sum(len(r.token_times) for r in completed)):
        figures["tokens_per_chunk"] = sum(r.output_tokens for r in completed if r.token_times) / chunks
    return figures
