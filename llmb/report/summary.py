"""Text of a Result: each figure with its unit and a short explanation."""

from collections.abc import Iterator, Sequence

from llmb.report.goodput_text import goodput_text
from llmb.report.load_summary import client_line, interval_line, load_distributions, load_rows
from llmb.report.predictions.one_rank_text import one_rank_line, one_rank_rows
from llmb.report.setting_text import precision_text
from llmb.report.table import number, render, terminal_width
from llmb.results.result import GpuTelemetry, PredictionCheck, Result, Speculation

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
FIGURE_HEADER = ("figure", "value", "unit", "what it says")
DISTRIBUTION_HEADER = ("over requests", *STATISTICS, "unit", "what it says")
# Warnings of what was requested, not of what went wrong.
NOTES = ("PROXY", "ONE_RANK", "NO_PEAK", "FAULT_INJECTION", "FORCED_ACCEPTANCE")


def summary(result: Result) -> str:
    """Return the tables that end `llmb-run submit`, and the warnings below."""
    lines = [f"{result.name}: {result.status}" + (f" ({result.reason})" if result.reason else "")]
    if result.number_formats:
        lines.append(f"precision: {precision_text(result.number_formats)}")
    if result.last_lines:
        lines += ["", f"last lines of rank {result.failed_rank}:", *(f"  {line}" for line in result.last_lines)]
    if result.one_rank is not None:
        lines.append(one_rank_line(result.one_rank))
    width = terminal_width()
    rows = list(figure_rows(result))
    if rows:
        lines += ["", render(FIGURE_HEADER, rows, width)]
    distributions = list(distribution_rows(result))
    if distributions:
        lines += ["", render(DISTRIBUTION_HEADER, distributions, width)]
    if result.goodput is not None:
        lines += ["", goodput_text(result.goodput, width)]
    if (client := client_line(result)) is not None:
        lines += ["", *filter(None, [interval_line(result), client])]
    if result.time_spent:
        lines += ["", _time_spent(result)]
    if result.collectives:
        lines += ["", _collectives(result)]
    if result.warnings:
        lines += ["", *warning_lines(result)]
    return "\n".join(lines)


def warning_lines(result: Result) -> list[str]:
    """Return a line for each warning."""
    return [f"{'note' if w.code in NOTES else 'warning'} {w.code}: {w.text}" for w in result.warnings]


def figure_rows(result: Result) -> Iterator[tuple[str, str, str, str]]:
    yield from _training_rows(result)
    if result.one_rank is not None:
        yield from one_rank_rows(result.one_rank, result.gpu)
    yield from _serving_rows(result)
    if result.mean_power_w is not None:
        yield "power", number(result.mean_power_w), "W", f"of one GPU, on average{telemetry_text(result.telemetry)}"
    if result.joules_per_token is not None:
        yield "energy", number(result.joules_per_token), "J/token", "of GPUs alone: sampled power over tokens/s"
    predicted = result.predicted
    if predicted is not None:
        yield "against prediction", f"{predicted.ratio:.3f}", "x", _prediction_text(predicted)
    reference = result.reference
    if reference is not None:
        value = f"{reference.ratio:.3f}"
        explanation = f"of the published {reference.metric} {number(reference.value)} ({reference.source})"
        yield "against reference", value, "x", f"{explanation}; above 1 is faster"
    elif result.proxy and (result.steps_done or result.requests):
        yield "against reference", "-", "", f"none: a proxy ({result.proxy})"


def _prediction_text(check: PredictionCheck) -> str:
    unit = "s a step" if check.metric == "step_time_s" else "tokens/s"
    text = (
        f"measured {number(check.measured)}, predicted {number(check.value)} {unit} ({check.source}); above 1 is faster"
    )
    if check.interval_80 is None:
        return text
    interval = f"the 80 % interval, {number(check.interval_80[0])} to {number(check.interval_80[1])}"
    if check.likely_reason is None:
        return f"{text}; within {interval}"
    return f"{text}; outside {interval}; likely reason: {check.likely_reason}"


def _training_rows(result: Result) -> Iterator[tuple[str, str, str, str]]:
    step = result.step_time_s
    if step is not None and result.window is not None:
        first, last = result.window
        spread = f", standard deviation {number(step.std)}" if step.std is not None else ""
        steps = f"{step.n} steps ({first}-{last})"
        if step.n < last - first + 1:  # an incomplete run, or a log that does not print every step
            steps = f"{step.n} of the {last - first + 1} steps {first}-{last}"
        yield "step time", number(step.median), "s", f"median of {steps}{spread}"
        yield "mean step time", number(step.mean), "s", f"the same steps, from {number(step.min)} to {number(step.max)}"
    if result.tokens_per_s is not None:
        yield "throughput", number(result.tokens_per_s), "tokens/s", "tokens of a step over its median time"
    if result.tokens_per_s_per_gpu is not None and (result.gpus or 0) != 1:
        yield "throughput per GPU", number(result.tokens_per_s_per_gpu), "tokens/s", "the same for one GPU"
    if result.tflops_per_gpu is not None:
        convention = f", attention counted {result.mfu_convention}" if result.mfu_convention else ""
        yield (
            "compute",
            number(result.tflops_per_gpu),
            "TFLOP/s",
            f"per device, {'from ' if result.tflops_source == 'model FLOPs' else ''}{result.tflops_source}{convention}",
        )
    if result.mfu is not None:
        peak = f"{number(result.mfu_peak_tflops or 0)} TFLOP/s {result.mfu_peak_dtype} peak"
        yield "MFU", f"{100 * result.mfu:.2f}", "%", f"useful compute against the {peak}"
    if result.hfu is not None and result.hfu != result.mfu:
        yield "HFU", f"{100 * result.hfu:.2f}", "%", "the same with recomputed work counted"
    if (ceiling := result.measured_ceiling) is not None and ceiling.fraction is not None:
        measured = f"{number(ceiling.tflops)} TFLOP/s of {ceiling.dtype} GEMMs, {ceiling.source}"
        yield "of measured ceiling", f"{100 * ceiling.fraction:.2f}", "%", f"useful compute against {measured}"
    if result.days_per_1t_tokens is not None:
        yield "time to train", number(result.days_per_1t_tokens), "days", "for 1T tokens at this throughput"
    if result.peak_memory_gib is not None:
        yield "peak memory", number(result.peak_memory_gib), "GiB", _memory_text(result)
    for slow in result.slow_ranks:
        where = f" on {slow.host}" if slow.host else ""
        explanation = f"{number(slow.own_s)} s of own work a step, the median of the others {number(slow.usual_s)}"
        yield f"slow rank {slow.rank}{where}", f"{slow.ratio:.2f}", "x", explanation
    if result.loss_first is not None and result.loss_last is not None:
        yield "loss", number(result.loss_last), "", f"at step {result.steps_done}, from {number(result.loss_first)}"


def _memory_text(result: Result) -> str:
    """Return whose peak was measured."""
    if _machine(result) != "cpu":
        return "highest device memory in use"
    is_out_of_core = "update" in result.number_formats
    return "device buffers of the plan, on this CPU's memory" if is_out_of_core else "highest process memory in use"


def _serving_rows(result: Result) -> Iterator[tuple[str, str, str, str]]:
    steady = "" if result.steady_window_s is None else "from {:.4g} to {:.4g} s".format(*result.steady_window_s)
    per_gpu = result.output_tokens_per_s_per_gpu if (result.gpus or 0) != 1 else None
    rates = (
        ("requests", result.request_throughput, "requests/s", "finished, over the whole run"),
        ("output, whole run", result.output_tokens_per_s, "tokens/s", "generated, all GPUs together"),
        ("output, steady", result.steady_output_tokens_per_s, "tokens/s", f"while the engine was full, {steady}"),
        ("output per GPU", per_gpu, "tokens/s", "of the whole run, for one GPU"),
        ("tokens/s/user", result.output_tokens_per_s_per_user, "tokens/s", "of one request, waiting included; mean"),
        ("input and output", result.total_tokens_per_s, "tokens/s", "read and generated, over the whole run"),
        ("concurrency", result.mean_concurrency, "requests", "in progress at once, on average"),
    )
    for name, value, unit, explanation in rates:
        if value is not None:
            yield name, number(value), unit, explanation
    if (ceiling := result.measured_ceiling) is not None and result.requests:
        measured = f"{number(ceiling.tflops)} TFLOP/s, {number(ceiling.memory_gbs)} GB/s"
        yield "measured ceilings", measured, "", f"{ceiling.dtype} GEMMs and memory of one GPU, {ceiling.source}"
    yield from load_rows(result)
    if result.speculation is not None:
        yield from speculation_rows(result.speculation)
    yield from _resource_rows(result)


def distribution_rows(result: Result) -> Iterator[tuple[str | None, ...]]:
    """Yield a row for each figure with a distribution over requests or tokens."""
    speed = result.output_speed_tokens_per_s
    speeds = result.output_speed_summary_tokens_per_s or (None if speed is None else {"mean": speed})
    distributions = (
        ("TTFT", result.ttft_ms, "ms", "to the first token"),
        ("TPOT", result.tpot_ms, "ms", "per output token after the first"),
        ("ITL", result.itl_ms, "ms", "between two output tokens"),
        ("end to end", result.e2e_ms, "ms", "to the last token"),
        ("output speed", speeds, "tokens/s", "p99 is the fastest"),
    )
    for name, values, unit, explanation in (*distributions, *load_distributions(result)):
        if values:
            cells = (number(values[s]) if s in values else None for s in STATISTICS)
            yield name, *cells, unit, explanation


def speculation_rows(drafts: Speculation) -> Iterator[tuple[str, str, str, str]]:
    """Yield acceptance of drafts, and measured and modelled speed-up."""
    how = "forced, of " if drafts.acceptance_forced else "of "
    stated = "" if drafts.stated_acceptance is None else f"; stated {_rates(drafts.stated_acceptance)}"
    yield "draft acceptance", _rates(drafts.acceptance), "", f"{how}each after those before it{stated}"
    limit = f"of at most {drafts.tokens + 1} that a step verifies; draft {drafts.draft}"
    yield "tokens per step", f"{drafts.tokens_per_step:.3f}", "tokens", limit
    modelled = drafts.modelled_note or "not known"
    if drafts.modelled_speedup is not None:
        modelled = f"{drafts.modelled_speedup:.2f} x at this acceptance"
        if drafts.speedup is not None:
            modelled += f", measured / modelled {drafts.speedup / drafts.modelled_speedup:.3f}"
    if drafts.speedup is not None:
        tpots = f"TPOT {number(drafts.plain_tpot_ms or 0)} ms without, {number(drafts.drafted_tpot_ms or 0)} with"
        yield "speed-up by drafts", f"{drafts.speedup:.2f}", "x", f"{tpots}, of one batch; modelled: {modelled}"


def _rates(rates: Sequence[float | None]) -> str:
    return " ".join("-" if rate is None else f"{rate:.3g}" for rate in rates)


def _resource_rows(result: Result) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows of KV cache and energy."""
    if result.kv_cache_gib is not None:
        used = "" if result.kv_peak_use is None else f", {100 * result.kv_peak_use:.0f} % of it used at most"
        yield "KV cache", number(result.kv_cache_gib), "GiB", f"of one GPU{used}"
    if result.energy_joules is not None:
        doubt = ", which sampled power contradicts" if result.energy_valid is False else ""
        yield "energy", number(result.energy_joules), "J", f"all GPUs together, by their counters{doubt}"
    if result.output_tokens_per_joule is not None:
        yield "efficiency", number(result.output_tokens_per_joule), "tokens/J", "generated for that energy"


def telemetry_text(telemetry: GpuTelemetry | None) -> str:
    """Return limit, clock and throttling in clauses; empty where nothing was sampled."""
    if telemetry is None:
        return ""
    limit, clock = telemetry.power_limit_w, telemetry.sm_clock_mhz
    text = "" if limit is None else f", limit {number(limit)} W"
    text += "" if clock is None else f"; SM clock {clock['p50']:,.0f} MHz (p5 {clock['p5']:,.0f})"
    reasons = ", ".join(f"{reason} {100 * part:.0f} %" for reason, part in telemetry.throttle_reasons.items())
    return text + (f"; throttled: {reasons} of samples" if reasons else "")


def _time_spent(result: Result) -> str:
    rows = [(t.kind, number(t.seconds_per_step), f"{100 * t.share:.1f}%") for t in result.time_spent]
    table = render(("where the time went", "s per step", "fraction"), rows)
    return table + ("\n(own times of CPU operations; idle is Python between them)" if _machine(result) == "cpu" else "")


def _machine(result: Result) -> str | None:
    """Return the type of GPU that a run ran on, or cpu."""
    return result.gpu if result.one_rank is None else result.one_rank.machine


def _collectives(result: Result) -> str:
    header = ("operation", "calls", "bytes", "datatype", "ranks")
    return render(
        header, [(c.operation, f"{c.calls:,}", _bytes(c.bytes), c.datatype, c.ranks) for c in result.collectives]
    )


def _bytes(count: int | None) -> str | None:
    return None if count is None else f"{count:,}"
