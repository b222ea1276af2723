"""Six views of a run, each closer than the one before: training, step, round, layers, step boundary.

    views(timeline) -> [View(name="training_overview", ...), ...]

Of steps, rounds and layers the middle ones are shown: the first ones still fill the link, the last ones drain it. What
the run does not have, as a round where rounds are not distinguished, is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmb.perfmodel.offload.stream_timeline import Phase
from llmb.report.timeline.named_ranges import NamedRange, RangeLevel
from llmb.report.timeline.tracks import Timeline

Name = Literal[
    "training_overview", "step_overview", "round_overview", "fwd_layers", "bwd_layers", "step_overhead"
]  # fmt: skip
SHORTEST_S = 1e-9  # shortest interval shown: below, clocks are not exact enough
LAYERS = 5  # shown of a forward or a backward pass
LAYERS_AT_BORDER = 3  # shown on either side of the border between two steps


@dataclass(frozen=True, kw_only=True)
class View:
    """One interval and how it is shown."""

    name: Name
    title: str
    place: str  # where in the run it lies
    noun: str  # what a fraction is a fraction of
    start: float
    end: float
    levels: tuple[RangeLevel, ...]  # of the named ranges above the tracks
    covers: tuple[object, ...]  # two views that cover the same may be compared
    steps: int = 1  # shown in it

    @property
    def seconds(self) -> float:
        return self.end - self.start


def views(timeline: Timeline) -> list[View]:
    """Return the views that the run has, from the widest to the closest."""
    step, after = _middle(timeline.ranges["step"])
    result = [_training(timeline), _step(timeline, step, after)]
    rounds = _within(timeline.ranges["round"], step)
    if rounds:
        middle, following = _middle(rounds)
        result.append(_round(middle, following))
        result += _layers(timeline, middle, "forward", "fwd_layers", "Forward layers")
        result += _layers(timeline, middle, "backward", "bwd_layers", "Backward layers")
    result += _border(timeline, step, after)
    return [view for view in result if view.seconds > SHORTEST_S]


def _middle(selected: Sequence[NamedRange]) -> tuple[NamedRange, NamedRange | None]:
    """Return the middle one, the earlier of two, and the one after it."""
    i = (len(selected) - 1) // 2
    return selected[i], selected[i + 1] if i + 1 < len(selected) else None


def _within(selected: Sequence[NamedRange], whole: NamedRange) -> list[NamedRange]:
    return [r for r in selected if r.start >= whole.start and r.end <= whole.end]


def _training(timeline: Timeline) -> View:
    steps = timeline.ranges["step"]
    first, last = steps[0].of.step, steps[-1].of.step
    return View(
        name="training_overview",
        title="Training overview",
        place=f"step {first}" if first == last else f"steps {first} to {last}",
        noun="the time",
        start=timeline.start,
        end=timeline.end,
        levels=("step", "round"),
        covers=(timeline.rounds,),
        steps=len(steps),
    )


def _step(timeline: Timeline, step: NamedRange, after: NamedRange | None) -> View:
    """Return the view of a step, until the next one begins."""
    return View(
        name="step_overview",
        title="Step overview",
        place=f"step {step.of.step}",
        noun="the step",
        start=step.start,
        end=after.start if after else step.end,
        levels=("round", "phase"),
        covers=(timeline.rounds,),
    )


def _round(middle: NamedRange, following: NamedRange | None) -> View:
    return View(
        name="round_overview",
        title="Round overview",
        place=f"round {middle.of.round} of step {middle.of.step}",
        noun="the round",
        start=middle.start,
        end=following.start if following else middle.end,
        levels=("phase", "layer"),
        covers=(),
    )


def _layers(timeline: Timeline, within: NamedRange, phase: Phase, name: Name, title: str) -> list[View]:
    layers = [r for r in _within(timeline.ranges["layer"], within) if r.of.phase == phase]
    first = max(0, (len(layers) - LAYERS) // 2)
    selected = layers[first : first + LAYERS]
    if not selected:
        return []
    numbers = [r.of.layer for r in selected]
    view = View(
        name=name,
        title=title,
        place=f"layers {numbers[0]} to {numbers[-1]} in round {within.of.round} of step {within.of.step}",
        noun="the time shown",
        start=selected[0].start,
        end=selected[-1].end,
        levels=("layer", "chunk"),
        covers=tuple(numbers),
    )
    return [view]


def _border(timeline: Timeline, step: NamedRange, after: NamedRange | None) -> list[View]:
    """Return the view of a step's last backward layers, the optimizer, and the next step's first forward layers."""
    layers = timeline.ranges["layer"]
    before_border = [r for r in _within(layers, step) if r.of.phase == "backward"][-LAYERS_AT_BORDER:]
    after_border = [r for r in _within(layers, after) if r.of.phase == "forward"][:LAYERS_AT_BORDER] if after else []
    updates = [s for s in timeline.by_stream["compute"] if s.phase == "update" and s.step == step.of.step]
    if not updates and not after_border:
        return []
    start = before_border[0].start if before_border else (updates[0].start if updates else step.start)
    view = View(
        name="step_overhead",
        title="Step overhead",
        place=f"from step {step.of.step} to step {after.of.step}" if after else f"the end of step {step.of.step}",
        noun="the time shown",
        start=start,
        end=after_border[-1].end if after_border else timeline.end,
        levels=("step", "phase", "layer"),
        covers=(*(r.of.layer for r in before_border), "update", *(r.of.layer for r in after_border)),
    )
    return [view]
