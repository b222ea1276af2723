"""The programs of a run, one after the other: compiled when a step is like none before, else used again.

    programs = Programs(model, plan)
    program = programs.next(Part(found), then=Part(found_by_the_next))

Steps soon find the same pieces in the same buffers as steps before them, and then have the same program.
"""

from functools import cache
from typing import NamedTuple

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import Piece
from llmb.perfmodel.offload.program import Program
from llmb.perfmodel.offload.residency import Residency, Snapshot
from llmb.perfmodel.offload.step_tasks import Beginning, Work, step_work, waiting_updates

KEPT = 16  # programs


class Part(NamedTuple):
    """A step with what it finds, or only the updates that wait there."""

    found: Beginning
    only_updates: bool = False

    @property
    def like(self) -> "Part":
        """All parts with the same work: it only matters whether there were updates before."""
        return self._replace(found=self.found._replace(updates=min(1, self.found.updates)))


class Programs:
    """Of one run; where its pieces are follows from the programs that were asked for."""

    def __init__(self, model: Model, plan: Plan):
        self.residency = Residency(model, plan)
        self._work = cache(lambda part: _work(model, plan, part))
        self._known: dict[tuple[Snapshot, Part, Part | None], tuple[Program, Snapshot]] = {}

    def next(self, part: Part, then: Part | None) -> Program:
        """Of the next part, given what comes behind it."""
        part, then = part.like, then.like if then else None
        key = (self.residency.snapshot(), part, then)
        if key not in self._known:
            program = self.residency.program(self._work(part), self._work(then) if then else ())
            if len(self._known) == KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = program, self.residency.snapshot()
        program, behind = self._known[key]
        self.residency.restore(behind)
        return program

    def buffer_of(self, piece: Piece) -> int | None:
        """Where a piece of a unit is on the device; none: it is at home."""
        return self.residency.where.get(piece)

    def home_of(self, piece: Piece) -> int:
        """A unit's own place at home."""
        return self.residency.homes[piece]

    def with_state(self) -> None:
        """Optimizer state is there from the beginning, as when an earlier run is taken up again."""
        away = {piece for piece in self.residency.homes if piece.kind == "state"}
        self.residency.at_home |= away


def _work(model: Model, plan: Plan, part: Part) -> list[Work]:
    return (waiting_updates if part.only_updates else step_work)(model, plan, part.found)
