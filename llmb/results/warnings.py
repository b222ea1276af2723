"""Warnings that a Result may carry: a closed list, each with what to do next."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from llmb.config.faults.fault_plan import FaultInjection
from llmb.config.load_settings import LoadConfig, load_settings_of
from llmb.config.spec import Inference, RunConfig
from llmb.events import Event, RunResumed, RunStarted, StepDone
from llmb.perfmodel import metrics
from llmb.perfmodel.hardware import gpu_key
from llmb.results.device_warnings import device_cautions
from llmb.results.load_warnings import load_cautions
from llmb.results.recorded_events import events_of, measured_requests
from llmb.results.result import Caution, SlowRank
from llmb.results.serving_figures import engine_facts

LOSS_SAMPLES = 5  # steps at each end of a run whose mean losses are compared
LOSS_NOISE = 0.1  # between the means of small batches
UNIFORM_MARGIN = 0.5  # above ln(vocabulary), the loss of uniform guessing
UNIFORM_AFTER = 20  # steps; wide models begin above that margin
NOISE_LIMIT = 0.05  # standard deviation over median
FEW_SAMPLES = 5
FULL_TIMES = 2  # how often the requests should fill the engine
LATE_LIMIT = 0.05  # fraction of the requested load that may be missing


def cautions(
    config: RunConfig | None, fields: dict, events: Sequence[Event], steps: Sequence[StepDone]
) -> tuple[Caution, ...]:
    """Return every warning that applies, in a fixed order; `steps` are those that the figures come from."""
    warnings = [*_about_samples(config, fields), *_about_ranks(fields.get("slow_ranks", ()))]
    warnings += _about_loss(config, [step.loss for step in steps if step.loss is not None])
    warnings += [*_about_serving(config, fields, events), *_about_config(config, fields)]
    if config is not None and config.fault_injection is not None:
        warnings.append(("FAULT_INJECTION", _fault_text(config.fault_injection)))
    for event in events_of(events, RunResumed):
        if event.differences:
            text = f"resumed although {event.checkpoint} was made with {'; '.join(event.differences)}"
            warnings.append(("FORCED_RESUME", f"{text}: losses are those of neither run"))
    start = next(iter(events_of(events, RunStarted)), None)
    if config is not None and start is not None:
        warnings += _about_machine(config, start)
    warnings += device_cautions(events)
    return tuple(Caution(code=code, text=text) for code, text in warnings)


def _fault_text(plan: FaultInjection) -> str:
    number = f"{len(plan.faults)} fault{' was' if len(plan.faults) == 1 else 's were'}"
    text = f"{number} injected on purpose ({plan.source})"
    return f"{text}: goodput and wall time are not those of an undisturbed run"


def _about_samples(config: RunConfig | None, fields: dict) -> Iterable[tuple[str, str]]:
    steps = fields.get("step_time_s")
    if steps is None:
        return
    if steps.n < FEW_SAMPLES:
        measured = f"{steps.n} step{' was' if steps.n == 1 else 's were'} measured"
        yield "FEW_SAMPLES", f"only {measured}; {_more_samples(config, fields)}"
    elif steps.std is not None and steps.median and steps.std / steps.median > NOISE_LIMIT:
        percent = 100 * steps.std / steps.median
        remedy = f"look for other work on the machine, or {_more_samples(config, fields)}"
        yield "NOISY_STEPS", f"step times vary by {percent:.0f} %; {remedy}"


def _more_samples(config: RunConfig | None, fields: dict) -> str:
    """Return how to measure more steps: a complete run, a window up to the last step without tracing, or more steps."""
    (first, last), done, requested = fields["window"], fields["steps_done"], fields["steps_asked"]
    if config is None or requested is None:
        return "run more steps"
    if done < last:
        return f"let it run to step {last}"
    traced = config.profile.profile and last < config.profile.profile_start <= requested
    longest = config.profile.profile_start - 1 if traced else requested
    if last < longest and any(override.field == "window" for override in config.overrides):
        return f"measure more of its steps (--set window={first}-{longest})"
    if traced:
        return "run it without profiling, as the window ends before the traced steps"
    return f"run more steps (--set steps={2 * requested})"


def _about_loss(config: RunConfig | None, losses: Sequence[float]) -> Iterable[tuple[str, str]]:
    """Warn of a loss that ends above its beginning, or above that of a model that guesses."""
    samples = min(LOSS_SAMPLES, len(losses) // 2)
    if not samples:
        return
    first, last = fmean(losses[:samples]), fmean(losses[-samples:])
    if last > first + LOSS_NOISE:
        means = f"from {first:.2f} to {last:.2f}" + (f", means of {samples} steps" if samples > 1 else "")
        yield "LOSS_ROSE", f"the loss rose {means}: training diverges; lower lr or lengthen lr_warmup_steps"
    elif config is not None and len(losses) >= UNIFORM_AFTER and last > math.log(config.model.vocab) + UNIFORM_MARGIN:
        uniform = f"ln(vocabulary) = {math.log(config.model.vocab):.2f}"
        yield "LOSS_ABOVE_UNIFORM", f"the loss ends at {last:.2f}, above {uniform} of uniform guessing; change lr"


def _about_ranks(slow: Iterable[SlowRank]) -> Iterable[tuple[str, str]]:
    """Warn of ranks that the others wait for, once per host, as the node may be the slow part."""
    by_host: dict[str | int, list[SlowRank]] = {}
    for rank in slow:
        by_host.setdefault(rank.host if rank.host is not None else rank.rank, []).append(rank)
    for ranks in by_host.values():
        worst = max(ranks, key=lambda rank: rank.ratio)
        names = ", ".join(str(rank.rank) for rank in ranks)
        subject = f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
        where = f" on {worst.host}" if worst.host else ""
        more = f"{worst.own_s:.3g} s of own work a step, {100 * (worst.ratio - 1):.0f} % more than the median rank"
        holds = "holds" if len(ranks) == 1 else "hold"
        yield "SLOW_RANK", f"{subject}{where} {holds} the others up: {more}; look at what else runs there"


def _about_serving(config: RunConfig | None, fields: dict, events: Sequence[Event]) -> Iterable[tuple[str, str]]:
    """Warn of what keeps a serving benchmark's figures from representing the engine."""
    measured = measured_requests(events)
    load = load_settings_of(config)
    if load is not None and measured:
        yield from load_cautions(load, measured, fields, events)
        return
    if config is None or not isinstance(config.workload, Inference) or not measured:
        return
    work, failed = config.workload, [r for r in measured if r.error is not None]
    if failed:
        example = f"the first: request {failed[0].request}: {failed[0].error}"
        yield "FAILED_REQUESTS", f"{len(failed)} of {len(measured)} requests failed and are left out; {example}"
    full = min(work.concurrency, work.max_batch_size * _replicas(config))
    if len(measured) < FULL_TIMES * full and work.rate is None:
        hint = f"--set num_requests={FULL_TIMES * full}"
        yield "FEW_REQUESTS", f"{len(measured)} requests for {full} at a time: ramp-up and drain weigh much; {hint}"
    if (
        fields.get("steady_output_tokens_per_s") is None and work.streaming and work.rate is None
    ):  # else nobody saw when tokens came
        yield "NOT_STEADY", "the engine was never full for long: no steady window is given; run more requests"
    late = metrics.late_fraction(measured, work.concurrency) if work.rate is None else None
    if late is not None and late > LATE_LIMIT:
        yield "CLIENT_BOUND", f"{100 * late:.0f} % of the load was missing: requests were sent late, not served slowly"
    if work.prefix_cache:
        yield "PREFIX_CACHE_ON", "prompts may be read from the cache; set prefix_cache=false to measure the engine"
    if work.draft_acceptance is not None:
        yield "FORCED_ACCEPTANCE", "drafts are accepted by stated chance: the speed of that acceptance, not the text"
    elif work.draft_model is not None and work.weights is None:
        yield "RANDOM_DRAFT", "random weights agree with their draft by chance; state draft_acceptance=FILE"
    if config.model.experts is not None and work.weights is None:
        yield "RANDOM_ROUTING", "random weights choose other experts than trained ones; set weights=FOLDER to be sure"
    if any(facts.dequantised for facts in engine_facts(events).values()):
        note = fields.get("weights_note") or f"{config.precision.dtype} weights are dequantized for the computation"
        yield "DEQUANTISED", f"{note}: this GPU has no {config.precision.dtype} matmul, so this is not its speed"


def _replicas(config: RunConfig) -> int:
    """Return the number of attention replicas, each with a batch of its own."""
    per_rank = isinstance(config.workload, Inference) and config.workload.attention_dp
    return config.parallel.dp * (config.parallel.tp if per_rank else 1)


def _about_config(config: RunConfig | None, fields: dict) -> Iterable[tuple[str, str]]:
    if config is None or isinstance(config, LoadConfig):
        return
    if config.proxy:
        yield "PROXY", "a proxy of the model; do not compare it with published results or scale it up"
    if config.one_rank is not None:
        ranks = config.parallel.world_size
        yield "ONE_RANK", f"one rank of {ranks} ran, without its peers; do not compare it with a run of all {ranks}"
    if config.profile.profile or config.profile.nccl_trace:
        yield "PROFILER_ON", "tracing slows a run; take the figures from a run without it"
    if fields.get("tflops_per_gpu") is not None and fields.get("mfu") is None:
        measured = fields.get("measured_ceiling")
        remedy = "its measured ceiling is" if measured else "`llmb-run probe` measures a ceiling that is given instead"
        peak = f"no published {config.precision.dtype} peak for {config.machine.gpu}: MFU is not given"
        yield "NO_PEAK", f"{peak}, {remedy}" if config.machine.gpu != "cpu" else peak


def _about_machine(config: RunConfig, start: RunStarted) -> Iterable[tuple[str, str]]:
    for line in start.fallbacks:
        yield "FALLBACK", f"{line}; compare the speed only with runs that have it, too"
    expected = config.launch_machine.gpu
    if expected in ("cpu", None) or start.gpu_name is None:
        return
    if gpu_key(start.gpu_name, config.launch_machine.gpu_memory_bytes) != expected:
        yield (
            "OTHER_GPU",
            f"ran on {start.gpu_name}, not on {expected}: MFU and references are for {expected}; fix --gpu-type",
        )
