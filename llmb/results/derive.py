"""Derivation of a Result from events and a configuration; the only place that leaves warm-up out.

    result = derive(config, read_all(run.all_events()))

Training figures come from rank 0, the other ranks show which was slow; requests come from all ranks.
The log of another engine has no configuration: what cannot be known without one stays null.
"""

from collections.abc import Iterable
from dataclasses import asdict

from llmb.config.load_settings import LoadConfig, LoadSettings
from llmb.config.native.number_formats import number_formats
from llmb.config.spec import Inference, OutOfCore, RunConfig, Status, Training
from llmb.events import (
    CollectiveSeen,
    Event,
    LogProblem,
    RunEnded,
    RunStarted,
    ServingSummary,
    StepDone,
    TimeSpent,
)
from llmb.formats.device_facts import recorded_facts
from llmb.perfmodel import flops, hardware, metrics
from llmb.perfmodel.garbage_collection import paused_garbage_collection
from llmb.perfmodel.shards import has_explicit_layers, recomputed_macs_per_token
from llmb.results.goodput.goodput_figures import goodput
from llmb.results.gpu_telemetry import gpu_telemetry, measured_interval
from llmb.results.log_window import MEGATRON_BRIDGE_WINDOW
from llmb.results.prediction_check import check_prediction
from llmb.results.recorded_events import RecordedEvents
from llmb.results.result import Collective, Comparison, MeasuredCeiling, Result, SlowRank, TimeShare
from llmb.results.serving_figures import serving_fault, serving_fields, summary_fields
from llmb.results.slow_ranks import slow_ranks
from llmb.results.warnings import cautions

NO_VERDICT = {"CLIENT_LATE", "PREFIX_CACHED"}  # warnings with which no published result is compared


@paused_garbage_collection()
def derive(
    config: RunConfig | None,
    events: Iterable[Event],
    name: str = "",
    window: tuple[int, int] | None = None,
    usual_window: tuple[int, int] = MEGATRON_BRIDGE_WINDOW,
) -> Result:
    """Derive the Result of one run; `usual_window`: of a log without configuration, shortened where it is shorter."""
    recorded = RecordedEvents.of(events)
    steps = _steps(recorded)
    status, reason = _status(recorded, steps, config)
    fields: dict = {
        "name": config.name if config else name,
        "status": status,
        "reason": reason,
        **_failure_fields(recorded),
    }
    fields |= _identity(config, recorded)
    if steps:
        chosen = _window(steps, config, window, usual_window)
        fields |= _training_fields(config, steps, chosen)
        fields["slow_ranks"] = _slow_ranks(config, recorded, fields)
        fields["goodput"] = goodput(config, recorded, fields.get("tokens_per_s"))
    fields |= serving_fields(recorded, config)
    fields |= _telemetry_fields(recorded, steps, fields)
    for totals in recorded.of_type(ServingSummary):
        fields |= summary_fields(totals)
    fields["measured_ceiling"] = _measured_ceiling(config, fields.get("tflops_per_gpu"))
    fields["time_spent"] = tuple(TimeShare(**asdict(e)) for e in recorded.of_type(TimeSpent))
    fields["collectives"] = tuple(Collective(**asdict(e)) for e in recorded.of_type(CollectiveSeen))
    for event in recorded.of_type(LogProblem):
        problems = fields.setdefault("log_problems", {})
        problems[event.problem] = problems.get(event.problem, 0) + event.count
    if config is not None and config.one_rank is not None:
        from llmb.results.one_rank_figures import CLUSTER_FIGURES, one_rank_step  # here: few runs need the predictor

        fields = {name: value for name, value in fields.items() if name not in CLUSTER_FIGURES}
        fields["one_rank"] = one_rank_step(config, fields)
    warnings = cautions(config, fields, recorded, steps)
    if NO_VERDICT.isdisjoint(warning.code for warning in warnings):
        fields["reference"] = _compare_with_reference(config, fields)
    return Result(**fields, predicted=check_prediction(config, fields, warnings), warnings=warnings)


def _steps(events: RecordedEvents) -> list[StepDone]:
    """Return the steps of the lowest rank that has any (some engines log on the last); repeated ones once."""
    done = events.of_type(StepDone)
    lowest = min((e.rank for e in done), default=0)
    by_step = {e.step: e for e in done if e.rank == lowest}
    return [by_step[number] for number in sorted(by_step)]


def _status(events: RecordedEvents, steps: list[StepDone], config: RunConfig | None) -> tuple[Status, str | None]:
    """Return status and reason of the last RunEnded; fewer steps or requests than configured are incomplete."""
    end = _end(events)
    if end is None:
        return "incomplete", "no end was recorded: the run was killed or is still going"
    status, reason = end.status, end.reason
    requested = _requested_steps(steps, config)
    if status == "ok" and requested and (not steps or steps[-1].step < requested):
        return "incomplete", f"{steps[-1].step if steps else 0} of {requested} steps are recorded"
    fault = serving_fault(events, config) if status == "ok" else None
    return fault or (status, reason)


def _end(events: RecordedEvents) -> RunEnded | None:
    """Return the last RunEnded of rank 0, to which llmb-run appends its verdict."""
    return next((event for event in reversed(events.of_type(RunEnded)) if event.rank == 0), None)


def _failure_fields(events: RecordedEvents) -> dict:
    end = _end(events)
    return {} if end is None else {"failed_rank": end.failed_rank, "last_lines": end.last_lines}


def _requested_steps(steps: list[StepDone], config: RunConfig | None) -> int | None:
    if config is not None:
        return None if isinstance(config.workload, (Inference, LoadSettings)) else config.workload.steps
    return next((s.steps for s in steps if s.steps), None)


def _identity(config: RunConfig | None, events: RecordedEvents) -> dict:
    """Fields that say what produced the figures."""
    fields: dict = {}
    start = next((event for event in events.of_type(RunStarted) if event.rank == 0), None)
    if start is not None:
        fields |= {"started": start.time, "gpu_name": start.gpu_name, "host": start.host}
        fields |= {"commit": start.commit, "versions": start.versions, "fallbacks": start.fallbacks}
        fields["device"] = {k: v for k, v in asdict(recorded_facts(start.device)).items() if v not in (None, (), [])}
    if config is not None:
        fields |= {"target": config.target, "size": config.size, "dtype": config.precision.dtype}
        fields |= {"gpu": config.machine.gpu, "gpus": config.machine.gpus, "engine": config.engine}
        fields |= {"proxy": config.proxy, "overrides": tuple(asdict(o) for o in config.overrides)}
        fields["number_formats"] = {} if isinstance(config, LoadConfig) else number_formats(config)
    return fields


def _window(
    steps: list[StepDone], config: RunConfig | None, window: tuple[int, int] | None, usual_window: tuple[int, int]
) -> tuple[int, int]:
    """Return the first and last measured step; a short log of another engine is measured over its second half."""
    if window is not None:
        return window
    if config is not None and not isinstance(config.workload, Inference):
        return config.workload.window
    last = next((s.steps for s in steps if s.steps), steps[-1].step)
    return usual_window if last >= usual_window[1] else (min(usual_window[0], last // 2 + 1), last)


def _training_fields(config: RunConfig | None, steps: list[StepDone], window: tuple[int, int]) -> dict:
    measured = [s for s in steps if window[0] <= s.step <= window[1] and not s.warmup]
    statistics = metrics.summarize([s.seconds for s in measured if s.seconds is not None])
    losses = [s.loss for s in steps if s.loss is not None]
    memory = [s.memory_bytes for s in steps if s.memory_bytes is not None]
    fields: dict = {
        "step_time_s": statistics,
        "window": window,
        "steps_done": steps[-1].step,
        "steps_asked": _requested_steps(steps, config),
        "peak_memory_gib": max(memory) / hardware.GIB if memory else None,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
    }
    tokens = {s.tokens for s in measured if s.tokens is not None}
    if statistics is not None and statistics.median > 0 and len(tokens) == 1:
        fields["tokens_per_s"] = min(tokens) / statistics.median
        if config is None or not config.proxy:
            fields["days_per_1t_tokens"] = metrics.days_to_train(1e12, fields["tokens_per_s"])
    reported = metrics.summarize([s.reported_tflops_per_gpu for s in measured if s.reported_tflops_per_gpu is not None])
    if reported is not None:
        fields |= {"tflops_per_gpu": reported.median, "tflops_source": "reported by the engine"}
    rate = metrics.summarize(
        [s.reported_tokens_per_s_per_gpu for s in measured if s.reported_tokens_per_s_per_gpu is not None]
    )
    if rate is not None:
        fields["tokens_per_s_per_gpu"] = rate.median
    if config is not None and statistics is not None and "tokens_per_s" in fields:
        fields["tokens_per_s_per_gpu"] = fields["tokens_per_s"] / config.machine.gpus
        fields |= _utilisation(config, statistics.median, min(tokens))
    return fields


def _telemetry_fields(events: RecordedEvents, steps: list[StepDone], fields: dict) -> dict:
    """Return what GPUs did over the measured interval, and their mean power unless a counter gave it."""
    first, last = fields.get("window", (0, 0))
    telemetry = gpu_telemetry(events, measured_interval([s for s in steps if first <= s.step <= last and not s.warmup]))
    if telemetry is None:
        return {}
    power = fields.get("mean_power_w") or (telemetry.power_w or {}).get("mean")
    rate = fields.get("tokens_per_s_per_gpu") if steps else None
    energy = power / rate if power is not None and rate else None
    return {"telemetry": telemetry, "mean_power_w": power, "joules_per_token": energy}


def _slow_ranks(config: RunConfig | None, events: RecordedEvents, fields: dict) -> tuple[SlowRank, ...]:
    """Return the ranks others waited for; without a configuration it is unknown which ranks have equal work."""
    statistics = fields["step_time_s"]
    if config is None or statistics is None:
        return ()
    stage_ranks = max(1, config.machine.gpus // config.parallel.pp)
    return slow_ranks(events, fields["window"], statistics.median, stage_ranks)


def _utilisation(config: RunConfig, step_time_s: float, tokens: int) -> dict:
    """TFLOP/s, MFU and HFU by our own count of model FLOPs, against the peak of the dtype in use."""
    gpus, dtype, work = config.machine.gpus, config.precision.dtype, config.workload
    if isinstance(work, Inference):
        return {}
    sequences = tokens / work.seqlen
    sequence_flops = flops.run_flops_per_sequence(config)
    tflops = metrics.tflops_per_gpu(sequence_flops * sequences, step_time_s, gpus)
    peak = hardware.peak_flops(config.machine.gpu, dtype)
    fields: dict = {"tflops_per_gpu": tflops, "tflops_source": "model FLOPs", "mfu": metrics.mfu(tflops, peak)}
    fields["mfu_convention"] = config.flops_convention
    if peak is not None:
        fields |= {"mfu_peak_tflops": peak / hardware.TERA, "mfu_peak_dtype": dtype}
        hardware_tflops = metrics.tflops_per_gpu(_hardware_flops(config, sequences), step_time_s, gpus)
        fields["hfu"] = metrics.mfu(hardware_tflops, peak)
    return fields


def _measured_ceiling(config: RunConfig | None, tflops: float | None) -> MeasuredCeiling | None:
    """Return what `probe` measured, with the fraction reached: of fp8 GEMMs for fp8, else of bf16, on a CPU of fp32."""
    if config is None or isinstance(config, LoadConfig) or config.ceilings is None:
        return None
    ceilings, dtype = config.ceilings, config.precision.dtype
    base = "fp32" if config.launch_machine.gpu == "cpu" else "bf16"
    ceiling, measured = (ceilings.fp8_tflops, "fp8") if dtype == "fp8" else (ceilings.matmul_tflops, base)
    if ceiling is None or (dtype == "fp32") != (measured == "fp32"):
        return None
    fraction = None if tflops is None or config.one_rank is not None else tflops / ceiling
    return MeasuredCeiling(
        tflops=ceiling, dtype=measured, fraction=fraction, memory_gbs=ceilings.memory_gbs, source=ceilings.source
    )


def _hardware_flops(config: RunConfig, sequences: float) -> float | None:
    """Return the executed FLOPs, recomputation included: from recomputed layers, or from an out-of-core plan."""
    work = config.workload
    if isinstance(work, Training):
        model, convention = config.model, config.flops_convention
        recomputed = min(model.layers, work.recompute_layers * config.parallel.pp)
        if has_explicit_layers(config):
            recomputed_flops = 2.0 * recomputed * work.seqlen * recomputed_macs_per_token(model)
            return sequences * (flops.hardware_flops_per_sequence(model, work.seqlen, convention, 0) + recomputed_flops)
        return sequences * flops.hardware_flops_per_sequence(model, work.seqlen, convention, recomputed)
    if isinstance(work, OutOfCore) and work.plan is not None and work.prediction is not None:
        return work.prediction.hardware_flops * sequences / work.plan.gbs
    return None


def _compare_with_reference(config: RunConfig | None, fields: dict) -> Comparison | None:
    """Compare with the published step time, else rate. Never for a proxy, one rank or a run with faults."""
    if config is None or config.reference is None or config.proxy or config.one_rank or fields["status"] != "ok":
        return None
    if config.fault_injection is not None:  # a result with faults is none of that configuration
        return None
    ref, step = config.reference, fields.get("step_time_s")
    if ref.step_time_s is not None and step is not None:
        ratio = ref.step_time_s / step.median
        return Comparison(
            metric="step_time_s", value=ref.step_time_s, measured=step.median, ratio=ratio, source=ref.source
        )
    for metric in ("tokens_per_s", "output_tokens_per_s", "tflops_per_gpu"):
        published, measured = getattr(ref, metric), fields.get(metric)
        if published and measured:
            ratio = measured / published
            return Comparison(metric=metric, value=published, measured=measured, ratio=ratio, source=ref.source)
    return None
