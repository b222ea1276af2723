"""Top of a run's page: what ran on what, how fast, and is that good; one bar beside the figures it is measured against.

All bars are the same rate, higher is better: step times are turned into tokens/s per GPU by their ratio.
"""

from collections.abc import Iterator

from llmb.config.load_settings import LoadSettings
from llmb.config.spec import OutOfCore, Training
from llmb.formats.device_facts import power_limit_text, recorded_facts
from llmb.perfmodel.chip_limits import Limit
from llmb.report.goodput_text import restarts
from llmb.report.page.page_chart import COLOURS, GREY, PATTERNS, Chart, axis, pattern, plain, values
from llmb.report.page.run_record import RunRecord
from llmb.report.table import number
from llmb.results.result import Result

DECODE_LIMIT = "HBM bandwidth of a decode step"  # of TPOT: a larger batch moves more tokens within it
KIND_WORDS = {"training": "trained", "outofcore": "trained out of core", "inference": "served"}


def sentences(record: RunRecord) -> list[str]:
    """Return what ran, how fast it was, and how good that is."""
    result = record.result
    if result.status != "ok":
        reason = f": {result.reason}" if result.reason else ""
        speed = f"It ended as {result.status}{reason}."
    else:
        speed = _speed(result)
    return [_description(record), speed, " ".join(_comparisons(record))]


def _description(record: RunRecord) -> str:
    config, result = record.config, record.result
    work = config.workload
    if isinstance(work, LoadSettings):
        requests = f"{result.requests:,} requests" if result.requests is not None else "No request"
        return f"{requests} to {work.model or 'the model'} at {work.base_url} were answered."
    gpu = result.gpu_name or result.gpu or "unknown hardware"
    machine = config.launch_machine.gpus
    verb = KIND_WORDS[config.workload.kind]
    model = config.model.name
    proxy = f" as a proxy ({config.proxy})" if config.proxy else ""
    dtype = f" in {config.precision.dtype}" if config.precision.dtype else ""
    amount = ""
    if isinstance(work, Training | OutOfCore) and result.steps_done:
        amount = f", {result.steps_done} steps of {number((work.gbs or 0) * work.seqlen)} tokens"
    elif result.requests is not None:
        amount = f", {result.requests:,} requests"
    plan = config.fault_injection
    if plan is not None:
        amount += f", with {len(plan.faults)} faults injected on purpose ({plan.source})"
    count = f"{machine} x {gpu}" if machine else gpu
    limit = power_limit_text(recorded_facts(result.device))
    power = f" ({limit})" if limit else ""
    return f"{model}{proxy} was {verb}{dtype} on {count}{power} by engine {result.engine}{amount}."


def _speed(result: Result) -> str:
    if result.step_time_s is not None and result.window is not None:
        first, last = result.window
        words = [f"A step takes {number(result.step_time_s.median)} s (median of steps {first}-{last})"]
        if result.tokens_per_s is not None:
            words.append(f"{number(result.tokens_per_s)} tokens/s")
        if result.tflops_per_gpu is not None:
            words.append(f"{number(result.tflops_per_gpu)} TFLOP/s per {'process' if result.gpu == 'cpu' else 'GPU'}")
        if result.mfu is not None:
            words.append(f"MFU {100 * result.mfu:.1f} %")
        elif result.measured_ceiling is not None and result.measured_ceiling.fraction is not None:
            words.append(f"{100 * result.measured_ceiling.fraction:.1f} % of the measured ceiling")
        return ", ".join(words) + "." + _goodput(result)
    if result.output_tokens_per_s is not None:
        words = [f"It generated {number(result.output_tokens_per_s)} output tokens/s"]
        if result.ttft_ms and result.tpot_ms:
            words.append(
                f"TTFT {number(result.ttft_ms['p50'])} ms and TPOT {number(result.tpot_ms['p50'])} ms at the median"
            )
        if result.ttft_ms and "p99" in result.ttft_ms:
            words.append(f"TTFT {number(result.ttft_ms['p99'])} ms at p99")
        return ", ".join(words) + "."
    return "It recorded no step and no request to measure."


def _goodput(result: Result) -> str:
    """Return the goodput of a run that restarted, as one more sentence."""
    if result.goodput is None:
        return ""
    fraction = f", {100 * result.goodput.fraction:.1f} % of that" if result.goodput.fraction is not None else ""
    rate = number(result.goodput.tokens_per_s)
    return f" Over wall time it advanced {rate} useful tokens/s{fraction}, with {restarts(result.goodput)}."


def _comparisons(record: RunRecord) -> Iterator[str]:
    """Yield the comparison with prediction, reference and limit, each or why there is none."""
    result, config = record.result, record.config
    predicted = result.predicted
    if predicted is not None:
        where = ""
        if predicted.interval_80 is not None:
            low, high = predicted.interval_80
            inside = "within" if low <= predicted.measured <= high else "outside"
            where = f", {inside} its 80 % interval of {number(low)} to {number(high)}"
        reason = f"; likely reason: {predicted.likely_reason}" if predicted.likely_reason else ""
        yield f"That is {predicted.ratio:.2f} times the predicted speed{where}{reason}."
    else:
        note = config.predicted.note if config.predicted is not None else None
        yield f"No prediction: {note or 'none was stored with it'}."
    if result.reference is not None:
        published = result.reference
        yield f"It is {published.ratio:.2f} times as fast as the published reference ({published.source})."
    else:
        yield "No published reference: " + (
            "it is a proxy."
            if config.proxy
            else "faults were injected."
            if config.fault_injection
            else "none is known for this configuration."
        )
    limit = nearest_limit(record)
    if limit is not None:
        yield (
            f"It uses {100 * limit.fraction:.0f} % of what the chip sustains "
            f"({number(limit.needed)} of {number(limit.limit)} {limit.unit}, {limit.name})."
        )


def nearest_limit(record: RunRecord, of_rate: bool = False) -> Limit | None:
    """Return the limit of the chip that the run is closest to; None: none is known. `of_rate`: of tokens/s only."""
    limits = record.explanation.limits if record.explanation is not None else ()
    limits = tuple(limit for limit in limits if not (of_rate and limit.name == DECODE_LIMIT))
    return max(limits, key=lambda limit: limit.fraction, default=None)


def bar_chart(record: RunRecord) -> Chart | None:
    """Return measured, predicted, published and possible rates as bars; None where nothing is known beside it."""
    result = record.result
    rate, unit = _rate(result)
    if rate is None or result.status != "ok":
        return None
    rows: list[tuple[str, float, int, tuple[float, float] | None]] = [("measured", rate, 0, None)]
    predicted = result.predicted
    if predicted is not None:
        interval = None
        if predicted.interval_80 is not None:
            bounds = sorted(
                rate * _ratio(predicted.metric, predicted.measured, bound) for bound in predicted.interval_80
            )
            interval = (bounds[0], bounds[1])
        rows.append(("predicted", rate / predicted.ratio, 1, interval))
    if result.reference is not None:
        rows.append(("published", rate / result.reference.ratio, 2, None))
    limit = nearest_limit(record, of_rate=True)
    if limit is not None:
        rows.append(("limit of the chip", rate / limit.fraction, 3, None))
    if len(rows) == 1:
        return None
    rows.reverse()
    traces = [
        {
            "type": "bar", "orientation": "h", "y": [f"{plain(name)}<br>{number(value)}" for name, value, *_ in rows],
            "x": values(value for _, value, *_ in rows), "hovertemplate": "%{y}: %{x:.5g} " + unit + "<extra></extra>",
            "marker": {
                "color": [COLOURS[i] if i < 3 else GREY for _, _, i, _ in rows],
                "pattern": pattern([PATTERNS[i] for _, _, i, _ in rows]),
            },
            "error_x": {
                "type": "data", "symmetric": False, "color": GREY,
                "array": values(0 if interval is None else interval[1] - value for _, value, _, interval in rows),
                "arrayminus": values(0 if interval is None else value - interval[0] for _, value, _, interval in rows),
            },
        }
    ]  # fmt: skip
    captions = ["Longer is faster." + (" The line on the predicted bar is its 80 % interval." if predicted else "")]
    if limit is not None:
        captions.append(f"The limit is that of {limit.name}: the part of the chip's peak that long runs sustain.")
    return Chart(
        name="comparison", title=f"Measured, predicted, published and the limit, {unit}", traces=traces, whole=True,
        layout={"xaxis": axis(unit, rangemode="tozero"), "yaxis": {"automargin": True}, "hovermode": "closest"},
        captions=captions, height=80 + 42 * len(rows),
    )  # fmt: skip


def _rate(result: Result) -> tuple[float | None, str]:
    if result.output_tokens_per_s is not None:
        per_gpu = result.output_tokens_per_s_per_gpu
        return (
            (per_gpu, "output tokens/s per GPU")
            if per_gpu is not None
            else (result.output_tokens_per_s, "output tokens/s")
        )
    return result.tokens_per_s_per_gpu, "tokens/s per GPU"


def _ratio(metric: str, measured: float, bound: float) -> float:
    """Return the rate at a bound of the prediction against the measured rate."""
    return measured / bound if metric == "step_time_s" else bound / measured
