"""Inference figures, from recorded requests or from the totals that another engine prints.

Requests of all ranks count alike: each rank records its own, on one clock. Warm-up is left out here and nowhere else.
Without streaming a response arrives whole, so figures that need its first token are null.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any

from llmb.config.load_settings import LoadSettings, load_settings_of
from llmb.config.spec import Inference, RunConfig, Status
from llmb.events import Event, RequestDone, ServingFacts, ServingSample, ServingSummary
from llmb.perfmodel import metrics
from llmb.perfmodel.hardware import GIB
from llmb.results.load_figures import load_fields
from llmb.results.recorded_events import completed_requests, events_of, measured_requests
from llmb.results.result import Result
from llmb.results.speculation_figures import speculation_fields

RATES = ("duration_s", "request_throughput", "output_tokens_per_s", "total_tokens_per_s", "mean_concurrency")
STREAMED = ("ttft_ms", "tpot_ms", "itl_ms", "output_speed_tokens_per_s", "output_speed_summary_tokens_per_s")
COUNTED = (
    "output_tokens", "output_tokens_per_s", "output_tokens_per_s_per_gpu", "output_tokens_per_s_per_user",
    "total_tokens_per_s", "steady_output_tokens_per_s", "steady_window_s", "lengths_wrong",
)  # fmt: skip
COUNTS = ("requests", "requests_failed", "input_tokens", "output_tokens")


def engine_facts(events: Iterable[Event]) -> dict[int, ServingFacts]:
    """Return each rank's facts about its engine and device; later events override earlier ones."""
    by_rank: dict[int, dict[str, Any]] = {}
    for event in events_of(events, ServingFacts):
        fields = {name: value for name, value in asdict(event).items() if value is not None}
        by_rank.setdefault(event.rank, {}).update(fields)
    return {rank: ServingFacts(**by_rank[rank]) for rank in sorted(by_rank)}


def serving_fields(events: Sequence[Event], config: RunConfig | None) -> dict:
    """Return throughput over all measured requests and latencies of the successful ones; empty without requests."""
    facts = engine_facts(events)
    fields = _device_fields(facts) | {"kv_peak_use": _kv_peak_use(events)}
    requests = events_of(events, RequestDone)
    if not requests:
        return fields if facts else {}
    measured, completed = measured_requests(events), completed_requests(events)
    warmup = len(requests) - len(measured)
    fields |= {"requests": len(completed), "requests_failed": len(measured) - len(completed)}
    fields |= {"warmup_requests": warmup or _first(facts, "warmup_requests")}
    fields |= {
        "input_tokens": sum(completed.input_tokens),
        "output_tokens": sum(completed.output_tokens),
    }
    fields |= {
        "lengths_wrong": _lengths_wrong(completed, config),
        "issue_rate_requests_per_s": metrics.issue_rate(measured),
    }
    latencies = metrics.request_latencies_ms(completed)
    fields |= _rates(completed, config.machine.gpus if config else None) | _latencies(completed, latencies)
    fields |= _energy(facts, fields["output_tokens"], config) | speculation_fields(facts, config)
    work = serving_work(config)
    if work is not None and not work.streaming:
        fields |= dict.fromkeys(STREAMED)
    if any(r.counted_by == "nobody" for r in completed):
        fields |= dict.fromkeys(COUNTED)
    return fields | load_fields(events, config, measured, latencies, fields)


def serving_work(config: RunConfig | None) -> Inference | LoadSettings | None:
    """Return the requests that a serving run was configured to send; None of any other run."""
    work = config.workload if config is not None else None
    return work if isinstance(work, (Inference, LoadSettings)) else None


def serving_fault(events: Sequence[Event], config: RunConfig | None) -> tuple[Status, str] | None:
    """Return why a successful run did not measure what was configured, or None if it did."""
    work = serving_work(config)
    if work is None or _has_totals(events):
        return None
    measured, completed = measured_requests(events), completed_requests(events)
    if measured and not completed:
        return "failed", f"no request succeeded; the first ended with: {measured[0].error}"
    elsewhere = load_settings_of(config) is not None  # a server of others need not obey: its lengths are a warning
    if elsewhere and (refused := _refused_at_the_end(measured)):
        done = f"{len(measured) - refused} of {len(measured)} requests"
        return "incomplete", f"the server was gone after {done}: {measured[-1].error}"
    wrong = _wrong_length(completed) if work.ignore_eos and not elsewhere else []
    if wrong:
        first = wrong[0]
        example = f"request {first.request} has {first.output_tokens} of {first.requested_tokens} tokens"
        return "failed", f"{len(wrong)} of {len(completed)} outputs do not have the requested length: {example}"
    expected = _first(engine_facts(events), "requests") or work.num_requests
    if expected is not None and len(measured) < expected and not getattr(work, "duration_s", None):
        return "incomplete", f"{len(measured)} of {expected} requests are recorded"
    return None


def _refused_at_the_end(measured: Sequence[RequestDone]) -> int:
    """Count the requests since the last success, where the last two found nobody to connect to."""
    count = 0
    while count < len(measured) and measured[-1 - count].error is not None:
        count += 1
    refused = [(measured[-1 - number].error or "").startswith("connect") for number in range(min(2, count))]
    return count if refused == [True, True] else 0


def summary_fields(summary: ServingSummary) -> dict:
    """Return another engine's totals under our field names; `ttft_ms.p99` goes into the mapping `ttft_ms`."""
    result_fields = {f.name for f in dataclass_fields(Result)}
    fields: dict = {}
    for key, value in summary.values.items():
        name, dot, statistic = key.partition(".")
        if name not in result_fields or value is None:
            continue
        if dot:
            fields.setdefault(name, {})[statistic] = value
        else:
            fields[name] = int(value) if name in COUNTS else value
    return fields


def _has_totals(events: Iterable[Event]) -> bool:
    return bool(events_of(events, ServingSummary))


def _rates(completed: Sequence[RequestDone], gpus: int | None) -> dict:
    """Return rates over the whole run, and over the window in which the engine is full."""
    whole = metrics.throughput(completed)
    steady = metrics.steady_state(completed, whole)
    fields: dict = {}
    if whole is not None:
        fields = {name: getattr(whole, name) for name in RATES}
        fields["output_tokens_per_s_per_gpu"] = metrics.tokens_per_s_per_gpu(whole.output_tokens_per_s, gpus)
    if steady is not None:
        fields["steady_output_tokens_per_s"] = steady.output_tokens_per_s
        fields["steady_window_s"] = (steady.start_s, steady.end_s)
    return fields


def _latencies(completed: Sequence[RequestDone], latencies: dict[str, Sequence[float]]) -> dict:
    fields: dict = {name: metrics.latency_summary(samples) for name, samples in latencies.items()}
    fields["itl_ms"] = metrics.latency_summary(metrics.pooled_itl_ms(completed))
    speed = metrics.latency_summary(metrics.output_speeds(latencies["tpot_ms"]))
    fields |= {"output_speed_tokens_per_s": speed and speed["mean"], "output_speed_summary_tokens_per_s": speed}
    user = metrics.latency_summary(metrics.user_throughputs(completed))
    return fields | {"output_tokens_per_s_per_user": user and user["mean"]}


def _wrong_length(completed: Sequence[RequestDone]) -> list[RequestDone]:
    return [r for r in completed if r.requested_tokens is not None and r.output_tokens != r.requested_tokens]


def _lengths_wrong(completed: Sequence[RequestDone], config: RunConfig | None) -> int | None:
    """Count outputs of a wrong length; None where EOS may end them, or no requested length was recorded."""
    work = serving_work(config)
    if work is None or not work.ignore_eos or all(r.requested_tokens is None for r in completed):
        return None
    return len(_wrong_length(completed))


def _kv_peak_use(events: Iterable[Event]) -> float | None:
    samples = [sample for sample in events_of(events, ServingSample) if not sample.warmup]
    return max((s.blocks_used / s.blocks for s in samples if s.blocks_used is not None and s.blocks), default=None)


def _device_fields(facts: dict[int, ServingFacts]) -> dict:
    """Return memory of the fullest GPU, and other facts from the first rank that has them."""
    fields: dict = {}
    sizes = {"kv_cache_gib": "cache_bytes", "weights_gib": "weight_bytes", "peak_memory_gib": "peak_memory_bytes"}
    for field, fact in sizes.items():
        bytes_by_rank = [size for size in (getattr(f, fact) for f in facts.values()) if size is not None]
        fields[field] = max(bytes_by_rank) / GIB if bytes_by_rank else None
    return fields | {name: _first(facts, name) for name in ("weights_note", "warmup_s", "energy_note")}


def _first(facts: dict[int, ServingFacts], name: str) -> Any:
    return next((value for value in (getattr(f, name) for f in facts.values()) if value is not None), None)


def _energy(facts: dict[int, ServingFacts], output_tokens: int, config: RunConfig | None) -> dict:
    """Return energy of all GPUs together; empty while one of them is missing."""
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
