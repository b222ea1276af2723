"""Named ranges of a run: step > round > phase > layer > chunk, derived from the events of the compute stream.

    ranges(events, "layer") -> (NamedRange(level="layer", start=..., end=..., of=TimelineEvent(...)), ...)

An optimizer that updates a layer between two backward layers must not split the backward pass in two: updates between
two events of one range belong to that range, and have a range of their own only below it. So ranges always nest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from llmb.perfmodel.offload.stream_timeline import TimelineEvent
from llmb.report.timeline.task_kinds import SHORT

RangeLevel = Literal["step", "round", "phase", "layer", "chunk"]
RANGE_LEVELS: tuple[RangeLevel, ...] = ("step", "round", "phase", "layer", "chunk")


@dataclass(frozen=True, kw_only=True)
class NamedRange:
    """Interval of time with a name; `of` is the first event in it, whose indices it has."""

    level: RangeLevel
    start: float
    end: float
    of: TimelineEvent

    @property
    def labels(self) -> tuple[str, ...]:
        """Spellings of its name, the longest first."""
        if self.level == "phase":
            return self.of.phase.capitalize(), SHORT.get(self.of.phase, self.of.phase).capitalize()
        number = str(getattr(self.of, self.level))
        if self.level == "chunk" and self.of.group is not None:  # chunks are numbered in their group
            return f"Group {self.of.group}, chunk {number}", f"G{self.of.group} C{number}", f"C{number}", number
        if self.level == "layer" and self.of.phase == "update":
            return f"Update of layer {number}", f"Update {number}"
        return f"{self.level.capitalize()} {number}", f"{self.level[0].upper()}{number}", number


def ranges(compute: Sequence[TimelineEvent], level: RangeLevel) -> tuple[NamedRange, ...]:
    """Return all ranges of a level, in time order; `compute` is sorted by start."""
    keys = _keys(compute, level)
    result = []
    for key, group in groupby(range(len(compute)), key=keys.__getitem__):
        if key is not None:
            members = [compute[i] for i in group]
            first_event = next((s for s in members if _key(s, level) == key), members[0])
            result.append(
                NamedRange(level=level, start=members[0].start, end=max(s.end for s in members), of=first_event)
            )
    return tuple(result)


def _keys(compute: Sequence[TimelineEvent], level: RangeLevel) -> list[tuple[object, ...] | None]:
    keys = [_key(event, level) for event in compute]
    for is_update, group in groupby(range(len(compute)), key=lambda i: compute[i].phase == "update"):
        block = list(group)
        before, after = block[0] - 1, block[-1] + 1
        around = keys[before] if before >= 0 and after < len(keys) and keys[before] == keys[after] else None
        if is_update and around is not None:
            for i in block:
                keys[i] = around
    return keys


def _key(event: TimelineEvent, level: RangeLevel) -> tuple[object, ...] | None:
    """Return what the events of one range have in common; null: it is in none of this level."""
    if level != "phase" and getattr(event, level) is None:
        return None
    numbers = {
        "step": (event.step,),
        "round": (event.step, event.round),
        "phase": (event.step, event.round, event.phase),
        "layer": (event.step, event.round, event.phase, event.layer),
        "chunk": (event.step, event.round, event.phase, event.layer, event.group, event.chunk),
    }
    return numbers[level]
