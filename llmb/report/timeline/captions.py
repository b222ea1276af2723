"""Captions of the pictures of a timeline, computed from the same data.

    captions(timeline, view) -> ["98 % of the copying time is hidden behind compute; ...", "Compute bounds it: ..."]

The first sentence says what is hidden and what is exposed, the second what bounds it. Where a prediction covers the
same interval, a third one compares both and names the kind of work that differs most.
"""

from collections import defaultdict
from itertools import pairwise

from llmb.perfmodel.offload.stream_timeline import StreamName
from llmb.report.timeline.axis_units import difference, duration, figures, percent
from llmb.report.timeline.optimizer_cost import optimizer_cost
from llmb.report.timeline.predicted_vs_measured import WAITING, TimelineComparison, compare
from llmb.report.timeline.task_kinds import DIRECTIONS, work_kind
from llmb.report.timeline.time_account import TimeBreakdown, time_breakdown
from llmb.report.timeline.tracks import Timeline, Wait
from llmb.report.timeline.views import View

BOUND_FRACTION = 0.9  # a stream that is busy for this fraction of the time bounds it
NOTICED_FRACTION = 5e-4  # waits below this are not worth a cause


def captions(timeline: Timeline, view: View, predicted: tuple[Timeline, View] | None = None) -> list[str]:
    """Return two sentences, and a third on the prediction."""
    breakdown = time_breakdown(timeline, view.start, view.end)
    sentences = [_hidden_and_exposed(timeline, view, breakdown), _bound(timeline, view, breakdown)]
    return sentences if predicted is None else [*sentences, _predicted(timeline, view, predicted)]


def _hidden_and_exposed(timeline: Timeline, view: View, breakdown: TimeBreakdown) -> str:
    if not breakdown.copying:
        hidden = "nothing is copied"
    elif breakdown.hidden > (1 - NOTICED_FRACTION) * breakdown.copying:
        hidden = "all copying is hidden behind compute"
    else:
        hidden = f"{percent(breakdown.hidden / breakdown.copying)} of the copying time is hidden behind compute"
    sentence = f"{hidden}; {_waiting(view, breakdown)}."
    if view.name == "training_overview" and timeline.steps > 1:
        return f"In {_steps(timeline)}, {sentence}"
    return sentence[0].upper() + sentence[1:]


def _steps(timeline: Timeline) -> str:
    """Format number and duration of steps, from the start of one to the start of the next; the last has no next."""
    starts = [step.start for step in timeline.ranges["step"]]
    times = sorted(b - a for a, b in pairwise(starts))
    low, high = duration(times[0]), duration(times[-1])
    return f"{timeline.steps} steps of {low}" + ("" if low == high else f" to {high}")


def _waiting(view: View, breakdown: TimeBreakdown) -> str:
    fraction = breakdown.waiting / breakdown.seconds
    if fraction < NOTICED_FRACTION:
        return "the GPU practically never waits"
    waiting = f"for {percent(fraction)} of {view.noun} ({duration(breakdown.waiting)}) the GPU waits"
    return f"{waiting}, {_cause(breakdown.waits)}"


def _cause(waits: tuple[Wait, ...]) -> str:
    """Name the kind of copy that causes most of the waiting, and the layer where one layer causes most of that."""
    by_kind: dict[tuple[StreamName, str] | None, float] = defaultdict(float)
    by_layer: dict[tuple[StreamName, str] | None, dict[int | None, float]] = defaultdict(lambda: defaultdict(float))
    for wait in waits:
        key = None if wait.copy is None else (wait.copy.stream, wait.copy.name)
        by_kind[key] += wait.end - wait.start
        by_layer[key][None if wait.copy is None else wait.copy.layer] += wait.end - wait.start
    worst = max(by_kind, key=lambda key: by_kind[key])
    mostly = "all of it" if len(by_kind) == 1 else "mostly"
    if worst is None:
        return f"{mostly} in gaps that end with no copy"
    stream, name = worst
    layers = by_layer[worst]
    layer = max(layers, key=lambda number: layers[number])
    where = ""
    if layer is not None and layers[layer] > by_kind[worst] / 2:
        where = f" of layer {layer}"
    elif len(layers) > 1:
        where = f" of {len(layers)} layers"
    leaving = " to leave" if stream == "outbound" else ""
    return f"{mostly} for the {work_kind(stream, name).label}{where}{leaving}"


def _bound(timeline: Timeline, view: View, breakdown: TimeBreakdown) -> str:
    fractions = {stream: seconds / breakdown.seconds for stream, seconds in breakdown.busy.items()}
    names: dict[StreamName, str] = {
        "compute": "compute", "inbound": "the link in", "outbound": "the link out",
        "disk_read": "reading the disk", "disk_write": "writing the disk",
    }  # fmt: skip
    full = [names[stream] for stream in timeline.shown_streams if fractions[stream] >= BOUND_FRACTION]
    listed = " and ".join(", ".join(full).rsplit(", ", 1))
    head = f"{listed} {'bounds' if len(full) == 1 else 'bound'} it" if full else "no stream bounds it alone"
    head = head[0].upper() + head[1:]
    busy = (
        f"compute is busy {percent(fractions['compute'])}, "
        f"the link {percent(fractions['inbound'])} in and {percent(fractions['outbound'])} out"
    )
    if "disk_write" in fractions:
        busy += f", the disk {percent(fractions['disk_read'])} reading and {percent(fractions['disk_write'])} writing"
    parts = [f"{head}: {busy}", *_speed(timeline, breakdown), _overhead(timeline, view, breakdown)]
    return "; ".join(part for part in parts if part) + "."


def _speed(timeline: Timeline, breakdown: TimeBreakdown) -> list[str]:
    if breakdown.tflops is None:
        return []
    peak = timeline.streams.peak_tflops
    of_peak = "" if peak is None else f", {percent(breakdown.tflops / peak)} of the peak"
    return [f"{figures(breakdown.tflops)} TFLOP/s{of_peak}"]


def _overhead(timeline: Timeline, view: View, breakdown: TimeBreakdown) -> str:
    """Describe overhead: the optimizer where the boundary of a step is shown, else recomputation."""
    if view.name in ("step_overview", "step_overhead"):
        return _optimizer(timeline)
    recompute_s = breakdown.seconds_of("compute", "recompute")
    return (
        f"recomputing takes {percent(recompute_s / breakdown.busy['compute'])} of the compute time"
        if recompute_s
        else ""
    )


def _optimizer(timeline: Timeline) -> str:
    cost = optimizer_cost(timeline)
    if cost is None:
        return "no optimizer update is recorded"
    parts = f"{duration(cost.kernels)} of kernels, {duration(cost.waiting)} of waiting"
    made_of = "all of it kernels" if cost.waiting < NOTICED_FRACTION * cost.exposed else parts
    return f"the optimizer holds up training for {duration(cost.exposed)} a step ({made_of})"


def _predicted(timeline: Timeline, view: View, predicted: tuple[Timeline, View]) -> str:
    compared = compare(timeline, view, *predicted)
    if compared is None:
        return "The prediction covers something else here, so the times are not compared."
    each = " a step" if view.steps > 1 or predicted[1].steps > 1 else ""
    if compared.shown_rounds:
        each += f" (from {compared.shown_rounds} of its {timeline.rounds} rounds)"
    measured_s, predicted_s = compared.measured, compared.predicted
    change = difference(measured_s / predicted_s)
    sentence = f"Predicted {duration(predicted_s)}{each}, measured {duration(measured_s)} ({change})"
    off = [_difference(*row) for row in _worst(compared) if abs(row[1] - row[2]) >= NOTICED_FRACTION * measured_s]
    return (
        f"{sentence}; largest differences: {'; '.join(off)}."
        if off
        else f"{sentence}; every kind of work takes the predicted time."
    )


def _worst(compared: TimelineComparison) -> list[tuple[tuple[StreamName, str], float, float]]:
    """Return the kind of work whose seconds differ most, then waiting, which follows from the others."""
    work = [row for row in compared.rows if row[0] != WAITING]
    waiting = [row for row in compared.rows if row[0] == WAITING]
    return [max(work, key=lambda row: abs(row[1] - row[2])), *waiting]


def _difference(work: tuple[StreamName, str], measured_s: float, predicted_s: float) -> str:
    stream, name = work
    label = "waiting" if work == WAITING else work_kind(stream, name).label + DIRECTIONS[stream]
    return f"{label}, predicted {duration(predicted_s)}, measured {duration(measured_s)}"
