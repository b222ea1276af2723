"""Charts of a training run over its steps: time, loss, gradient norm, memory, power and clocks, time by rank."""

from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Any

from llmb.events import StepDone
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.metrics import percentile
from llmb.report.page.page_chart import (
    COLOURS,
    Chart,
    axis,
    fill,
    horizontal_line,
    series,
    shaded,
    thinned_series,
    values,
)
from llmb.report.page.run_record import RunRecord
from llmb.report.page.telemetry_chart import telemetry_chart
from llmb.report.page.thinning import thin
from llmb.report.table import number
from llmb.results.gpu_telemetry import Interval, measured_interval

OUTLIER = 6.0  # median absolute deviations from the median of the window: 4 sigma of normal noise
MOST_OUTLIERS = 200  # marked: the farthest
MOST_BOXES = 64  # ranks drawn as boxes; of more, their medians
MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "kv_cache")


def training_charts(record: RunRecord) -> list[Chart]:
    """Return the charts of all that was recorded."""
    by_rank = steps_by_rank(record)
    if not by_rank:
        return []
    steps = by_rank[min(by_rank)]
    charts = [
        _step_times(record, steps),
        _series("loss", "Loss", steps, "loss", "loss", 1),
        _series("grad-norm", "Gradient norm", steps, "grad_norm", "norm", 2),
        _memory(steps),
        memory_by_kind(record),
        telemetry_chart(record, _window_interval(record, steps)),
        _by_rank(by_rank),
    ]
    return [chart for chart in charts if chart is not None]


def _window_interval(record: RunRecord, steps: Sequence[StepDone]) -> Interval | None:
    first, last = record.result.window or (1, 0)
    return measured_interval([step for step in steps if first <= step.step <= last and not step.warmup])


def steps_by_rank(record: RunRecord) -> dict[int, list[StepDone]]:
    """Return the steps of each rank in order; of a step that was repeated, the last."""
    steps = sorted(record.of_type(StepDone), key=lambda step: step.rank)
    return {
        rank: sorted({step.step: step for step in group}.values(), key=lambda step: step.step)
        for rank, group in groupby(steps, key=lambda step: step.rank)
    }


def outliers(steps: Sequence[StepDone], first: int, last: int) -> list[StepDone]:
    """Return the steps of the window far from its median, the farthest first."""
    window = [step for step in steps if first <= step.step <= last and step.seconds is not None]
    if len(window) < 3:
        return []
    middle = median(step.seconds for step in window if step.seconds is not None)
    spread = median(abs((step.seconds or 0.0) - middle) for step in window)
    far = [step for step in window if abs((step.seconds or 0.0) - middle) > OUTLIER * spread > 0]
    return sorted(far, key=lambda step: -abs((step.seconds or 0.0) - middle))


def _step_times(record: RunRecord, steps: Sequence[StepDone]) -> Chart | None:
    timed = [(float(step.step), step.seconds) for step in steps if step.seconds is not None]
    if not timed:
        return None
    bins = thin([x for x, _ in timed], [y for _, y in timed])
    traces = thinned_series("step time", bins, hover="%{y:.5g} s")
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    captions = [bins.caption("steps")]
    result = record.result
    if result.window is not None and result.step_time_s is not None:
        first, last = result.window
        shapes.append(shaded(first - 0.5, last + 0.5))
        lines = [(result.step_time_s.median, f"median {number(result.step_time_s.median)} s", "dot")]
        if result.predicted is not None and result.predicted.metric == "step_time_s":
            lines.append((result.predicted.value, f"predicted {number(result.predicted.value)} s", "dash"))
        for value, label, dash in lines:
            shape, note = horizontal_line(value, label, dash, left=dash == "dash")
            shapes.append(shape)
            notes.append(note)
        far = outliers(steps, first, last)
        if far:
            marked = far[:MOST_OUTLIERS]
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "name": "outlier", "x": values(step.step for step in marked),
                    "y": values(step.seconds for step in marked), "hovertemplate": "outlier %{y:.5g} s<extra></extra>",
                    "marker": {"symbol": "x", "size": 8, "color": COLOURS[1]},
                }
            )  # fmt: skip
        extent = f"The shaded window, steps {first} to {last}, is what figures are computed from"
        count = f"; {len(far)} of its steps are outliers, more than {OUTLIER:g} median absolute deviations away"
        more = f" (the {MOST_OUTLIERS} farthest are marked)" if len(far) > MOST_OUTLIERS else ""
        captions.append(extent + (count + more if far else "; none of its steps is an outlier") + ".")
    layout = {"xaxis": axis("step"), "yaxis": axis("s"), "shapes": shapes, "annotations": notes}
    return Chart(
        name="step-time",
        title="Step time",
        traces=traces,
        layout=layout,
        captions=[c for c in captions if c],
        whole=True,
    )


def _series(name: str, title: str, steps: Sequence[StepDone], field: str, unit: str, index: int) -> Chart | None:
    points = [(float(step.step), getattr(step, field)) for step in steps if getattr(step, field) is not None]
    if not points:
        return None
    bins = thin([x for x, _ in points], [y for _, y in points])
    caption = bins.caption("steps")
    (first, start), (last, end) = points[0], points[-1]
    ends = f"From {number(start)} at step {first:.0f} to {number(end)} at step {last:.0f}."
    return Chart(
        name=name, title=title, traces=thinned_series(title.lower(), bins, index),
        layout={"xaxis": axis("step"), "yaxis": axis(unit)}, captions=[ends, *([caption] if caption else [])],
    )  # fmt: skip


def _memory(steps: Sequence[StepDone]) -> Chart | None:
    points = [(float(step.step), step.memory_bytes / GIB) for step in steps if step.memory_bytes is not None]
    if not points:
        return None
    x, y = [x for x, _ in points], [y for _, y in points]
    return Chart(
        name="memory", title="Peak memory so far, GiB", traces=series("peak memory", x, y, 3, "%{y:.4g} GiB"),
        layout={"xaxis": axis("step"), "yaxis": axis("GiB", rangemode="tozero")},
        captions=[f"The first rank's highest memory in use up to each step: {number(y[-1])} GiB in the end."],
    )  # fmt: skip


def memory_by_kind(record: RunRecord) -> Chart | None:
    """Return the estimate of memory by kind beside the measured peak."""
    estimate = memory_estimate(record.config)
    kinds = {kind: getattr(estimate, kind) / GIB for kind in MEMORY_KINDS if getattr(estimate, kind)}
    if not kinds:
        return None
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": kind.replace("_", " "), "y": ["estimate"], "x": values([gib]),
            "marker": fill(i), "hovertemplate": f"{kind.replace('_', ' ')} %{{x:.4g}} GiB<extra></extra>",
        }
        for i, (kind, gib) in enumerate(kinds.items())
    ]  # fmt: skip
    measured = record.result.peak_memory_gib
    if measured is not None:
        traces.append(
            {
                "type": "bar", "orientation": "h", "name": "measured peak", "y": ["measured"], "x": values([measured]),
                "marker": fill(6), "hovertemplate": "measured peak %{x:.4g} GiB<extra></extra>",
            }
        )  # fmt: skip
    is_cpu = record.config.machine.gpu == "cpu"
    total = f"Estimated {number(sum(kinds.values()))} GiB {'per process' if is_cpu else 'on the fullest GPU'}"
    absent = "Python and its libraries" if is_cpu else "the context, workspaces and fragmentation"
    peak = f", measured {number(measured)} GiB" if measured is not None else ""
    return Chart(
        name="memory-kinds", title="Memory by kind, GiB", traces=traces, height=230,
        layout={"barmode": "stack", "xaxis": axis("GiB"), "yaxis": {"automargin": True}, "hovermode": "closest",
                "legend": {"y": -0.5}},
        captions=[f"{total}{peak}. The estimate leaves out {absent}."],
    )  # fmt: skip


def _by_rank(by_rank: dict[int, list[StepDone]]) -> Chart | None:
    """Return each rank's step times: boxes of few ranks, medians of many. Busy time where it is recorded."""
    if len(by_rank) < 2:
        return None
    busy = all(step.busy_s is not None for steps in by_rank.values() for step in steps if not step.warmup)
    noun = "busy time of a step, waiting excluded" if busy else "step time"
    times = {
        rank: [t for t in ((s.busy_s if busy else s.seconds) for s in steps if not s.warmup) if t is not None]
        for rank, steps in by_rank.items()
    }
    times = {rank: samples for rank, samples in times.items() if samples}
    if len(times) < 2:
        return None
    ranks, cuts = list(times), (0, 25, 50, 75, 100)
    low, q1, middle, q3, high = ([percentile(times[rank], q) for rank in ranks] for q in cuts)
    if len(ranks) > MOST_BOXES:
        traces = series("median of each rank", ranks, [m or 0.0 for m in middle], 0, "%{y:.5g} s")
        caption = f"Median {noun} of each rank, warm-up left out."
    else:
        traces = [
            {
                "type": "box", "x": ranks, "lowerfence": values(low), "q1": values(q1), "median": values(middle),
                "q3": values(q3), "upperfence": values(high), "name": "ranks", "marker": {"color": COLOURS[0]},
            }
        ]  # fmt: skip
        caption = f"Box: quartiles of the {noun}; whiskers: smallest and largest; warm-up left out."
    return Chart(
        name="ranks", title="Step time by rank", traces=traces, whole=len(ranks) > 16, captions=[caption],
        layout={"xaxis": axis("rank", tickformat="d"), "yaxis": axis("s"), "hovermode": "closest"},
    )  # fmt: skip
