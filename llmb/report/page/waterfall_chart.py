"""Waterfall of a step: from the chip's peak to the measured step, bar by bar, each with its arithmetic.

The seconds are measured where the run was profiled, else they are those of the prediction, and a last bar is what it
does not explain. The first bar is the time of the model FLOPs at the chip's peak; matrix products and attention are
what they take beyond it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from llmb.config.spec import OutOfCore, RunConfig, Training
from llmb.perfmodel.block_costs import block_stack
from llmb.perfmodel.flops import attention_pairs
from llmb.perfmodel.hardware import TERA
from llmb.report.page.page_chart import COLOURS, GREY, Chart, Trace, axis, pattern, plain, values
from llmb.report.page.run_record import RunRecord
from llmb.report.table import number
from llmb.results.result import Result

# Bar -> terms of the predictor, in the order of the picture.
TERMS = {
    "matrix products": ("gemm",),
    "attention": ("attention",),
    "memory-bound work": ("memory_bound", "quantization", "scan"),
    "recompute": ("recompute",),
    "communication": ("tp", "cp", "ep", "pp", "dp", "fsdp", "offload", "copies"),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
    "idle": ("launch", "host", "overhead", "jitter", "engine"),
}
SERVING_TERMS = {"gemm": "matrix products", "memory_bound": "memory-bound work"}  # others keep their names
ATTENTION_FLOPS_PER_MAC = 6.0  # forward and backward
AT_PEAK = "at the chip's peak"
NEGLIGIBLE = 1e-4  # of the step: shorter bars are left out
BAR_STYLE = {
    AT_PEAK: (GREY, ""), "matrix products": (COLOURS[0], ""), "attention": (COLOURS[4], "/"),
    "memory-bound work": (COLOURS[5], "."), "recompute": (COLOURS[7], "x"), "communication": (COLOURS[3], "-"),
    "bubble": (COLOURS[1], "\\"), "optimizer": (COLOURS[2], "+"), "idle": (COLOURS[6], "|"),
    "not explained": (COLOURS[1], "/"), "launch": (COLOURS[6], "|"), "host": (COLOURS[7], "x"),
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One bar: where it starts, how long it is, and how that was computed. Negative: less than expected."""

    name: str
    start_s: float
    seconds: float
    arithmetic: str


def step_bars(record: RunRecord) -> list[Bar]:
    """Return the bars from the peak to the step; none where neither a profile nor a prediction says."""
    config, result = record.config, record.result
    if result.step_time_s is None or not isinstance(config.workload, Training | OutOfCore):
        return []
    profile = {share.kind: share.seconds_per_step for share in result.time_spent}
    if profile:
        seconds, step_s = profile, sum(profile.values())
        sources = dict.fromkeys(profile, "measured by the profiler")
    else:
        terms = config.predicted.terms if config.predicted is not None else {}
        seconds, step_s = _by_bar(terms), result.step_time_s.median
        sources = {name: _sum_of(names, terms) for name, names in TERMS.items()}
    if not seconds:
        return []
    bars: list[Bar] = []
    at_peak = peak_seconds(config, result)
    if at_peak is not None:
        whole = sum(at_peak.values())
        flops = whole * (result.mfu_peak_tflops or 0.0)
        text = f"{number(flops)} TFLOP of the model per GPU / {number(result.mfu_peak_tflops or 0)} TFLOP/s peak"
        bars.append(Bar(AT_PEAK, 0.0, whole, text))
    for name, value in seconds.items():
        less = at_peak.get(name, 0.0) if at_peak is not None else 0.0
        text = sources.get(name, "") + (f" - {number(less)} s at the peak" if less else "")
        _append(bars, name, value - less, text, step_s)
    if not profile:
        reached = bars[-1].start_s + bars[-1].seconds
        text = f"{number(step_s)} s measured - {number(reached)} s predicted"
        _append(bars, "not explained", step_s - reached, text, step_s)
    return bars


def _append(bars: list[Bar], name: str, seconds: float, arithmetic: str, step_s: float) -> None:
    if abs(seconds) > NEGLIGIBLE * step_s:
        start = bars[-1].start_s + bars[-1].seconds if bars else 0.0
        bars.append(Bar(name, start, seconds, arithmetic))


def _by_bar(terms: Mapping[str, float]) -> dict[str, float]:
    sums = {name: sum(terms.get(term, 0.0) for term in names) for name, names in TERMS.items()}
    return {name: value for name, value in sums.items() if value}


def _sum_of(names: tuple[str, ...], terms: Mapping[str, float]) -> str:
    parts = [f"{name.replace('_', ' ')} {number(terms[name])} s" for name in names if terms.get(name)]
    return "predicted: " + " + ".join(parts)


def peak_seconds(config: RunConfig, result: Result) -> dict[str, float] | None:
    """Return the seconds of a step's model FLOPs at the peak, by bar; None: no peak is known."""
    work, step = config.workload, result.step_time_s
    if result.mfu is None or result.mfu_peak_tflops is None or step is None:
        return None
    if not isinstance(work, Training | OutOfCore) or not work.gbs or config.one_rank is not None:
        return None
    whole = result.mfu * step.median
    pairs = attention_pairs(work.seqlen, config.flops_convention)
    scores = sum(count * pairs * block.pair_macs for _, count, block in block_stack(config.model))
    flops = ATTENTION_FLOPS_PER_MAC * scores * work.gbs / config.machine.gpus
    attention = min(whole, flops / (result.mfu_peak_tflops * TERA))
    return {"matrix products": whole - attention, "attention": attention}


def step_chart(record: RunRecord) -> Chart | None:
    """Return the waterfall of a step; None where nothing says where the time went."""
    bars, result = step_bars(record), record.result
    if not bars or result.step_time_s is None:
        return None
    profiled = bool(result.time_spent)
    end = bars[-1].start_s + bars[-1].seconds
    rows = [*bars, Bar("profiled step" if profiled else "measured step", 0.0, end, "the sum of the bars above")]
    captions = ["Each bar begins where the one above ends; hover for its arithmetic, or see the table below."]
    if profiled:
        captions.append(
            f"Measured by the profiler, whose steps take {number(end)} s; the median step outside of it takes "
            f"{number(result.step_time_s.median)} s. Recomputed work counts as what it recomputes."
        )
    else:
        captions.append("Not profiled: the bars are the prediction's. Run it with -p to measure them.")
    title = "A step by kind of work, seconds"
    if bars[0].name == AT_PEAK:
        captions.append("Matrix products and attention are what they take beyond the peak.")
        title = "From the chip's peak to the step, seconds"
    return waterfall("waterfall", title, rows, captions)


def plan_chart(record: RunRecord) -> Chart | None:
    """Return what the plan of an out-of-core run expects of a step; copies run beside the computation."""
    terms = record.explanation.terms if record.explanation is not None else ()
    bars = [
        Bar(f"planned {term.kind}", 0.0, term.predicted_s, "by the plan's rates")
        for term in terms
        if term.predicted_s is not None
    ]
    step = record.result.step_time_s
    if not bars or step is None:
        return None
    bars.append(Bar("measured step", 0.0, step.median, "median of the window"))
    captions = ["All begin together: copies run beside the computation, and the longest stream bounds the step."]
    return waterfall("waterfall", "A step by stream, seconds", bars, captions)


def waterfall(name: str, title: str, bars: list[Bar], captions: list[str], unit: Literal["s", "ms"] = "s") -> Chart:
    """Return a chart of bars that begin where the one above ends."""
    drawn = bars[::-1]  # Plotly draws the first at the bottom
    scale = 1.0 if unit == "s" else 1e3
    styles = [BAR_STYLE.get(bar.name, (GREY, "")) for bar in drawn]
    trace: Trace = {
        "type": "bar", "orientation": "h",
        "y": [f"{plain(bar.name)}<br>{number(bar.seconds * scale)} {unit}" for bar in drawn],
        "x": values(bar.seconds * scale for bar in drawn), "base": values(bar.start_s * scale for bar in drawn),
        "customdata": [plain(bar.arithmetic) for bar in drawn],
        "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
        "marker": {
            "color": [colour for colour, _ in styles],
            "pattern": pattern([shape for _, shape in styles]),
        },
    }  # fmt: skip
    layout = {"xaxis": axis(unit, rangemode="tozero"), "yaxis": {"automargin": True}, "hovermode": "closest"}
    return Chart(
        name=name, title=title, traces=[trace], layout=layout, captions=captions, height=80 + 38 * len(bars), whole=True
    )


def serving_charts(record: RunRecord) -> list[Chart]:
    """Return the predicted terms of a decode step and of a prefill, each to its sum."""
    predicted = record.config.predicted
    terms = predicted.terms if predicted is not None else {}
    charts = []
    for prefix, title in (("decode_step_", "decode step"), ("prefill_", "prefill")):
        seconds = {name.removeprefix(prefix): value for name, value in terms.items() if name.startswith(prefix)}
        bars: list[Bar] = []
        for name, value in seconds.items():
            label = SERVING_TERMS.get(name, name.replace("_", " "))
            _append(bars, label, value, f"predicted: {name.replace('_', ' ')}", sum(seconds.values()))
        if not bars:
            continue
        end = bars[-1].start_s + bars[-1].seconds
        bars.append(Bar(f"predicted {title}", 0.0, end, "the sum of the bars above"))
        captions = ["Predicted: a serving run is not profiled by kind of work."]
        tpot = (record.result.tpot_ms or {}).get("mean")
        if prefix == "decode_step_" and tpot is not None:
            bars.append(Bar("measured TPOT", 0.0, tpot / 1000, "mean over requests"))
            captions.append("TPOT also includes the steps that prefill other requests, and scheduling.")
        name = f"terms-{prefix.strip('_').replace('_', '-')}"
        charts.append(waterfall(name, f"A {title}, milliseconds", bars, captions, "ms"))
    return charts
