"""Named ranges of a run: step > round > phase > layer > chunk, read off what the compute lane does one after the other.

    ranges(stretches, "layer") -> (Range(level="layer", start=..., end=..., of=Stretch(...)), ...)

An optimizer that updates a layer between two backward layers must not cut the backward pass in two: updates between two
stretches of one range belong to that range, and have a range of their own only below it. So ranges always nest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from llmb.perfmodel.offload.stream_timeline import Stretch
from llmb.report.timeline.task_kinds import SHORT

Level = Literal["step", "round", "phase", "layer", "chunk"]
LEVELS: tuple[Level, ...] = ("step", "round", "phase", "layer", "chunk")


@dataclass(frozen=True, kw_only=True)
class Range:
    """A stretch of time with a name; `of` is the first work in it, whose numbers it bears."""

    level: Level
    start: float
    end: float
    of: Stretch

    @property
    def labels(self) -> tuple[str, ...]:
        """Its name, the longest form first."""
        if self.level == "phase":
            return self.of.phase.capitalize(), SHORT.get(self.of.phase, self.of.phase).capitalize()
        number = str(getattr(self.of, self.level))
        if self.level == "chunk" and self.of.group is not None:  # chunks are numbered in their group
            return f"Group {self.of.group}, chunk {number}", f"G{self.of.group} C{number}", f"C{number}", number
        if self.level == "layer" and self.of.phase == "update":
            return f"Update of layer {number}", f"Update {number}"
        return f"{self.level.capitalize()} {number}", f"{self.level[0].upper()}{number}", number


def ranges(compute: Sequence[Stretch], level: Level) -> tuple[Range, ...]:
    """All ranges of a level, in time order; `compute` is sorted by start."""
    keys = _keys(compute, level)
    found = []
    for key, group in groupby(range(len(compute)), key=keys.__getitem__):
        if key is not None:
            members = [compute[i] for i in group]
            own = next((s for s in members if _key(s, level) == key), members[0])
            found.append(Range(level=level, start=members[0].start, end=max(s.end for s in members), of=own))
    return tuple(found)


def _keys(compute: Sequence[Stretch], level: Level) -> list[tuple[object, ...] | None]:
    keys = [_key(stretch, level) for stretch in compute]
    for is_update, group in groupby(range(len(compute)), key=lambda i: compute[i].phase == "update"):
        block = list(group)
        before, after = block[0] - 1, block[-1] + 1
        around = keys[before] if before >= 0 and after < len(keys) and keys[before] == keys[after] else None
        if is_update and around is not None:
            for i in block:
                keys[i] = around
    return keys


def _key(stretch: Stretch, level: Level) -> tuple[object, ...] | None:
    """What the stretches of one range have in common; null: it lies in none of this level."""
    if level != "phase" and getattr(stretch, level) is None:
        return None
    numbers = {
        "step": (stretch.step,),
        "round": (stretch.step, stretch.round),
        "phase": (stretch.step, stretch.round, stretch.phase),
        "layer": (stretch.step, stretch.round, stretch.phase, stretch.layer),
        "chunk": (stretch.step, stretch.round, stretch.phase, stretch.layer, stretch.group, stretch.chunk),
    }
    return numbers[level]
