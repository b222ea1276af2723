"""What a picture of the lanes shows, in words computed from the same data.

    words(timeline, view) -> ["98 % of the copying time is hidden behind compute; ...", "Compute bounds it: ..."]

The first sentence says what is hidden and what is exposed, the second what bounds it. Where a prediction covers the
same span, a third one lays both side by side and names the kind of work that is off most.
"""

from collections import defaultdict
from itertools import pairwise

from llmb.perfmodel.offload.stream_timeline import LANES, Lane
from llmb.report.timeline.axis_units import difference, duration, figures, percent
from llmb.report.timeline.optimizer_cost import optimizer_cost
from llmb.report.timeline.predicted_vs_measured import WAITING, Comparison, compare
from llmb.report.timeline.task_kinds import kind
from llmb.report.timeline.time_account import Account, account
from llmb.report.timeline.tracks import Timeline, Wait
from llmb.report.timeline.views import View

BOUND_SHARE = 0.9  # a lane that is busy for this much of the time bounds it
NOTICED_SHARE = 5e-4  # waits below this are not worth a cause


def words(timeline: Timeline, view: View, predicted: tuple[Timeline, View] | None = None) -> list[str]:
    """Two sentences, and a third on the prediction."""
    here = account(timeline, view.start, view.end)
    said = [_hidden_and_exposed(timeline, view, here), _bound(timeline, view, here)]
    return said if predicted is None else [*said, _predicted(timeline, view, predicted)]


def _hidden_and_exposed(timeline: Timeline, view: View, here: Account) -> str:
    if not here.copying:
        hidden = "nothing is copied"
    elif here.hidden > (1 - NOTICED_SHARE) * here.copying:
        hidden = "all copying is hidden behind compute"
    else:
        hidden = f"{percent(here.hidden / here.copying)} of the copying time is hidden behind compute"
    said = f"{hidden}; {_waiting(view, here)}."
    if view.name == "training_overview" and timeline.steps > 1:
        return f"In {_steps(timeline)}, {said}"
    return said[0].upper() + said[1:]


def _steps(timeline: Timeline) -> str:
    """How many and how long, from the start of one to the start of the next; the last has no next."""
    starts = [step.start for step in timeline.ranges["step"]]
    times = sorted(b - a for a, b in pairwise(starts))
    low, high = duration(times[0]), duration(times[-1])
    return f"{timeline.steps} steps of {low}" + ("" if low == high else f" to {high}")


def _waiting(view: View, here: Account) -> str:
    share = here.waiting / here.seconds
    if share < NOTICED_SHARE:
        return "the GPU practically never waits"
    return f"for {percent(share)} of {view.noun} ({duration(here.waiting)}) the GPU waits, {_cause(here.waits)}"


def _cause(waits: tuple[Wait, ...]) -> str:
    """The kind of copy that costs most of the waiting, and the layer where one layer makes up most of that."""
    by_kind: dict[tuple[Lane, str] | None, float] = defaultdict(float)
    by_layer: dict[tuple[Lane, str] | None, dict[int | None, float]] = defaultdict(lambda: defaultdict(float))
    for wait in waits:
        key = None if wait.copy is None else (wait.copy.lane, wait.copy.name)
        by_kind[key] += wait.end - wait.start
        by_layer[key][None if wait.copy is None else wait.copy.layer] += wait.end - wait.start
    worst = max(by_kind, key=lambda key: by_kind[key])
    mostly = "all of it" if len(by_kind) == 1 else "mostly"
    if worst is None:
        return f"{mostly} in gaps that end with no copy"
    lane, name = worst
    layers = by_layer[worst]
    layer = max(layers, key=lambda number: layers[number])
    where = ""
    if layer is not None and layers[layer] > by_kind[worst] / 2:
        where = f" of layer {layer}"
    elif len(layers) > 1:
        where = f" of {len(layers)} layers"
    leaving = " to leave" if lane == "outbound" else ""
    return f"{mostly} for the {kind(lane, name).label}{where}{leaving}"


def _bound(timeline: Timeline, view: View, here: Account) -> str:
    shares = {lane: seconds / here.seconds for lane, seconds in here.busy.items()}
    names: dict[Lane, str] = {"compute": "compute", "inbound": "the link in", "outbound": "the link out"}
    full = [names[lane] for lane in LANES if shares[lane] >= BOUND_SHARE]
    listed = " and ".join(", ".join(full).rsplit(", ", 1))
    head = f"{listed} {'bounds' if len(full) == 1 else 'bound'} it" if full else "no lane bounds it alone"
    head = head[0].upper() + head[1:]
    busy = (
        f"compute is busy {percent(shares['compute'])}, "
        f"the link {percent(shares['inbound'])} in and {percent(shares['outbound'])} out"
    )
    parts = [f"{head}: {busy}", *_speed(timeline, here), _overhead(timeline, view, here)]
    return "; ".join(part for part in parts if part) + "."


def _speed(timeline: Timeline, here: Account) -> list[str]:
    if here.tflops is None:
        return []
    peak = timeline.lanes.peak_tflops
    of_peak = "" if peak is None else f", {percent(here.tflops / peak)} of the peak"
    return [f"{figures(here.tflops)} TFLOP/s{of_peak}"]


def _overhead(timeline: Timeline, view: View, here: Account) -> str:
    """What is not the plain work: the optimizer where the border of a step is shown, else recomputing."""
    if view.name in ("step_overview", "step_overhead"):
        return _optimizer(timeline)
    again = here.seconds_of("compute", "recompute")
    return f"recomputing takes {percent(again / here.busy['compute'])} of the compute time" if again else ""


def _optimizer(timeline: Timeline) -> str:
    cost = optimizer_cost(timeline)
    if cost is None:
        return "no optimizer update is recorded"
    parts = f"{duration(cost.kernels)} of kernels, {duration(cost.waiting)} of waiting"
    made_of = "all of it kernels" if cost.waiting < NOTICED_SHARE * cost.exposed else parts
    return f"the optimizer holds up training for {duration(cost.exposed)} a step ({made_of})"


def _predicted(timeline: Timeline, view: View, predicted: tuple[Timeline, View]) -> str:
    compared = compare(timeline, view, *predicted)
    if compared is None:
        return "The prediction covers something else here, so the times are not compared."
    each = " a step" if view.steps > 1 or predicted[1].steps > 1 else ""
    if compared.shown_rounds:
        each += f" (from {compared.shown_rounds} of its {timeline.rounds} rounds)"
    was, should = compared.measured, compared.predicted
    said = f"Predicted {duration(should)}{each}, measured {duration(was)} ({difference(was / should)})"
    off = [_difference(*row) for row in _worst(compared) if abs(row[1] - row[2]) >= NOTICED_SHARE * was]
    return f"{said}; off most: {'; '.join(off)}." if off else f"{said}; every kind of work takes what was foreseen."


def _worst(compared: Comparison) -> list[tuple[tuple[Lane, str], float, float]]:
    """The kind of work whose seconds differ most, then waiting, which follows from the others."""
    work = [row for row in compared.rows if row[0] != WAITING]
    waiting = [row for row in compared.rows if row[0] == WAITING]
    return [max(work, key=lambda row: abs(row[1] - row[2])), *waiting]


def _difference(work: tuple[Lane, str], was: float, should: float) -> str:
    lane, name = work
    direction = {"compute": "", "inbound": " in", "outbound": " out"}[lane]
    label = "waiting" if work == WAITING else kind(lane, name).label + direction
    return f"{label}, predicted {duration(should)}, measured {duration(was)}"
