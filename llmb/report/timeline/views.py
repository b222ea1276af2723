"""The six spans of a run that are shown, each closer than the one before: training, step, round, layers, step border.

    views(timeline) -> [View(name="training_overview", ...), ...]

Of steps, rounds and layers the middle ones are taken: the first ones still fill the link, the last ones empty it. What
the run does not have, as a round where rounds are not told apart, is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmb.perfmodel.offload.stream_timeline import Phase
from llmb.report.timeline.named_ranges import Level, Range
from llmb.report.timeline.tracks import Timeline

Name = Literal[
    "training_overview", "step_overview", "round_overview", "fwd_layers", "bwd_layers", "step_overhead"
]  # fmt: skip
SHORTEST_S = 1e-9  # that can be shown: below, clocks say nothing
LAYERS = 5  # shown of a forward or a backward pass
LAYERS_AT_BORDER = 3  # shown on either side of the border between two steps


@dataclass(frozen=True, kw_only=True)
class View:
    """One span and how it is shown."""

    name: Name
    title: str
    place: str  # where in the run it lies
    noun: str  # what a share is a share of
    start: float
    end: float
    levels: tuple[Level, ...]  # of the named ranges above the lanes
    covers: tuple[object, ...]  # two views that cover the same may be compared
    steps: int = 1  # shown in it

    @property
    def seconds(self) -> float:
        return self.end - self.start


def views(timeline: Timeline) -> list[View]:
    """Those that the run has, from the widest to the closest."""
    step, after = _middle(timeline.ranges["step"])
    found = [_training(timeline), _step(timeline, step, after)]
    rounds = _within(timeline.ranges["round"], step)
    if rounds:
        here, following = _middle(rounds)
        found.append(_round(here, following))
        found += _layers(timeline, here, "forward", "fwd_layers", "Forward layers")
        found += _layers(timeline, here, "backward", "bwd_layers", "Backward layers")
    found += _border(timeline, step, after)
    return [view for view in found if view.seconds > SHORTEST_S]


def _middle(chosen: Sequence[Range]) -> tuple[Range, Range | None]:
    """The middle one, the earlier of two, and the one after it."""
    i = (len(chosen) - 1) // 2
    return chosen[i], chosen[i + 1] if i + 1 < len(chosen) else None


def _within(chosen: Sequence[Range], whole: Range) -> list[Range]:
    return [r for r in chosen if r.start >= whole.start and r.end <= whole.end]


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


def _step(timeline: Timeline, step: Range, after: Range | None) -> View:
    """Until the next one begins."""
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


def _round(here: Range, following: Range | None) -> View:
    return View(
        name="round_overview",
        title="Round overview",
        place=f"round {here.of.round} of step {here.of.step}",
        noun="the round",
        start=here.start,
        end=following.start if following else here.end,
        levels=("phase", "layer"),
        covers=(),
    )


def _layers(timeline: Timeline, within: Range, phase: Phase, name: Name, title: str) -> list[View]:
    layers = [r for r in _within(timeline.ranges["layer"], within) if r.of.phase == phase]
    first = max(0, (len(layers) - LAYERS) // 2)
    chosen = layers[first : first + LAYERS]
    if not chosen:
        return []
    numbers = [r.of.layer for r in chosen]
    view = View(
        name=name,
        title=title,
        place=f"layers {numbers[0]} to {numbers[-1]} in round {within.of.round} of step {within.of.step}",
        noun="the time shown",
        start=chosen[0].start,
        end=chosen[-1].end,
        levels=("layer", "chunk"),
        covers=tuple(numbers),
    )
    return [view]


def _border(timeline: Timeline, step: Range, after: Range | None) -> list[View]:
    """The last backward layers of a step, the optimizer, the first forward layers of the next one."""
    layers = timeline.ranges["layer"]
    before = [r for r in _within(layers, step) if r.of.phase == "backward"][-LAYERS_AT_BORDER:]
    behind = [r for r in _within(layers, after) if r.of.phase == "forward"][:LAYERS_AT_BORDER] if after else []
    updates = [s for s in timeline.of_lane["compute"] if s.phase == "update" and s.step == step.of.step]
    if not updates and not behind:
        return []
    start = before[0].start if before else (updates[0].start if updates else step.start)
    view = View(
        name="step_overhead",
        title="Step overhead",
        place=f"from step {step.of.step} to step {after.of.step}" if after else f"the end of step {step.of.step}",
        noun="the time shown",
        start=start,
        end=behind[-1].end if behind else timeline.end,
        levels=("step", "phase", "layer"),
        covers=(*(r.of.layer for r in before), "update", *(r.of.layer for r in behind)),
    )
    return [view]
