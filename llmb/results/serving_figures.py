"""Inference figures: from our own requests one by one, or from the totals a foreign engine prints.

Requests of all ranks count alike: each rank records those it took itself, on one clock. Warm-up is left out here, and
nowhere else. Without streaming an answer arrives whole, so what needs its first token is null even where that is known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any

from llmb.config.spec import Inference, RunConfig, Status
from llmb.events import Event, RequestDone, ServingFacts, ServingSample, ServingSummary
from llmb.perfmodel import metrics
from llmb.perfmodel.hardware import GIB
from llmb.results.result import Result

RATES = ("duration_s", "request_throughput", "output_tokens_per_s", "total_tokens_per_s", "mean_in_flight")
STREAMED = ("ttft_ms", "tpot_ms", "itl_ms", "output_speed_tokens_per_s", "output_speed_summary_tokens_per_s")
COUNTS = ("requests", "requests_failed", "input_tokens", "output_tokens")


def measured_requests(events: Iterable[Event]) -> list[RequestDone]:
    """Every request that counts, failed ones included."""
    return [e for e in events if isinstance(e, RequestDone) and not e.warmup]


def engine_facts(events: Iterable[Event]) -> dict[int, ServingFacts]:
    """What each rank said of its engine and device, by rank, what it said later on top of what it said before."""
    known: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, ServingFacts):
            said = {name: value for name, value in asdict(event).items() if value is not None}
            known.setdefault(event.rank, {}).update(said)
    return {rank: ServingFacts(**known[rank]) for rank in sorted(known)}


def serving_fields(events: Sequence[Event], config: RunConfig | None) -> dict:
    """Throughput over the span of the measured requests, latencies over those that succeeded; empty without any."""
    facts = engine_facts(events)
    found = _device_fields(facts) | {"kv_peak_use": _kv_peak_use(events)}
    if not any(isinstance(e, RequestDone) for e in events):
        return found if facts else {}
    measured = measured_requests(events)
    good = [r for r in measured if r.error is None]
    warmup = sum(isinstance(e, RequestDone) and e.warmup for e in events)
    found |= {"requests": len(good), "requests_failed": len(measured) - len(good)}
    found |= {"warmup_requests": warmup or _first(facts, "warmup_requests")}
    found |= {"input_tokens": sum(r.input_tokens for r in good), "output_tokens": sum(r.output_tokens for r in good)}
    found |= {"lengths_wrong": _lengths_wrong(good, config), "issue_rate_requests_per_s": metrics.issue_rate(measured)}
    found |= _rates(good, config.machine.gpus if config else None) | _latencies(good)
    found |= _energy(facts, found["output_tokens"], config)
    if config is not None and isinstance(config.workload, Inference) and not config.workload.streaming:
        found |= dict.fromkeys(STREAMED)
    return found


def serving_fault(events: Sequence[Event], config: RunConfig | None) -> tuple[Status, str] | None:
    """Why a run that ended well did not measure what was asked for; None when it did."""
    if config is None or not isinstance(config.workload, Inference) or _has_totals(events):
        return None
    measured = measured_requests(events)
    good = [r for r in measured if r.error is None]
    if measured and not good:
        return "failed", f"no request succeeded; the first ended with: {measured[0].error}"
    wrong = _of_wrong_length(good) if config.workload.ignore_eos else []
    if wrong:
        one = wrong[0]
        example = f"request {one.request} has {one.output_tokens} of {one.requested_tokens} tokens"
        return "failed", f"{len(wrong)} of {len(good)} answers are not as long as asked for: {example}"
    asked = _first(engine_facts(events), "requests") or config.workload.num_requests
    if len(measured) < asked:
        return "incomplete", f"{len(measured)} of {asked} requests are recorded"
    return None


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
            found[name] = int(value) if name in COUNTS else value
    return found


def _has_totals(events: Iterable[Event]) -> bool:
    return any(isinstance(e, ServingSummary) for e in events)


def _rates(good: list[RequestDone], gpus: int | None) -> dict:
    """Over the whole run, and over the window in which the engine is full."""
    whole, steady = metrics.throughput(good), metrics.steady(good)
    found: dict = {}
    if whole is not None:
        found = {name: getattr(whole, name) for name in RATES}
        found["output_tokens_per_s_per_gpu"] = metrics.tokens_per_s_per_gpu(whole.output_tokens_per_s, gpus)
    if steady is not None:
        found["steady_output_tokens_per_s"] = steady.output_tokens_per_s
        found["steady_window_s"] = (steady.start_s, steady.end_s)
    return found


def _latencies(good: list[RequestDone]) -> dict:
    found: dict = {name: metrics.latency_summary(samples) for name, samples in metrics.latencies_ms(good).items()}
    speed = metrics.latency_summary(_known(metrics.output_speed, good))
    found |= {"output_speed_tokens_per_s": speed and speed["mean"], "output_speed_summary_tokens_per_s": speed}
    user = metrics.latency_summary(_known(metrics.user_throughput, good))
    return found | {"output_tokens_per_s_per_user": user and user["mean"]}


def _known(figure: Callable[[RequestDone], float | None], requests: list[RequestDone]) -> list[float]:
    return [value for value in map(figure, requests) if value is not None]


def _of_wrong_length(good: list[RequestDone]) -> list[RequestDone]:
    return [r for r in good if r.requested_tokens is not None and r.output_tokens != r.requested_tokens]


def _lengths_wrong(good: list[RequestDone], config: RunConfig | None) -> int | None:
    """Null where an answer may end early, or where nobody recorded how long it was to be."""
    fixed = config is not None and isinstance(config.workload, Inference) and config.workload.ignore_eos
    if not fixed or all(r.requested_tokens is None for r in good):
        return None
    return len(_of_wrong_length(good))


def _kv_peak_use(events: Iterable[Event]) -> float | None:
    samples = [e for e in events if isinstance(e, ServingSample) and not e.warmup]
    return max((s.blocks_used / s.blocks for s in samples if s.blocks_used is not None and s.blocks), default=None)


def _device_fields(facts: dict[int, ServingFacts]) -> dict:
    """Memory of the fullest GPU, and what the first rank that knows says of the rest."""
    found: dict = {}
    sizes = {"kv_cache_gib": "cache_bytes", "weights_gib": "weight_bytes", "peak_memory_gib": "peak_memory_bytes"}
    for field, fact in sizes.items():
        known = [size for size in (getattr(f, fact) for f in facts.values()) if size is not None]
        found[field] = max(known) / GIB if known else None
    return found | {name: _first(facts, name) for name in ("weights_note", "warmup_s", "energy_note")}


def _first(facts: dict[int, ServingFacts], name: str) -> Any:
    return next((value for value in (getattr(f, name) for f in facts.values()) if value is not None), None)


def _energy(facts: dict[int, ServingFacts], output_tokens: int, config: RunConfig | None) -> dict:
    """Of all GPUs together: null as long as one of them is missing."""
    counted = [f.energy_joules for f in facts.values()]
    if not counted or None in counted or (config is not None and len(counted) != config.machine.gpus):
        return {}
    joules = sum(j for j in counted if j is not None)
    agreements = [metrics.energies_agree(f.energy_joules, f.power_joules) for f in facts.values()]
    powers = [f.mean_power_w for f in facts.values() if f.mean_power_w is not None]
    return {
        "energy_joules": joules,
        "energy_valid": None if None in agreements else all(agreements),
        "output_tokens_per_joule": output_tokens / joules if joules > 0 else None,
        "mean_power_w": sum(powers) / len(powers) if len(powers) == len(facts) else None,
    }
