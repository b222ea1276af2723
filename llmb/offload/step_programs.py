"""Programs of a run, one after the other: compiled when a step is like none before, else reused.

    programs = ProgramCache(model, plan)
    program = programs.next(StepRequest(start), followed_by=StepRequest(start_of_the_next))

Steps soon have the same contents in the same buffers as steps before them, and then the same program.
"""

from functools import cache
from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.perfmodel.offload.buffers import BufferKey
from llmb.perfmodel.offload.program import Program
from llmb.perfmodel.offload.residency import Residency, ResidencySnapshot
from llmb.perfmodel.offload.step_tasks import StepStart, StepTask, pending_updates, step_tasks

MAX_PROGRAMS = 16


class StepRequest(NamedTuple):
    """A step with the state it starts from, or only its pending updates."""

    start: StepStart
    only_updates: bool = False

    @property
    def canonical(self) -> "StepRequest":
        """The same for all requests with the same tasks: it only matters whether there were updates before."""
        return self._replace(start=self.start._replace(updates=min(1, self.start.updates)))


class ProgramCache:
    """Programs of one run; where its buffer contents are follows from the programs that were requested."""

    def __init__(self, model: Model, plan: Plan):
        self.residency = Residency(model, plan)
        self._tasks = cache(lambda request: _tasks(model, plan, request))
        self._programs: dict[
            tuple[ResidencySnapshot, StepRequest, StepRequest | None], tuple[Program, ResidencySnapshot]
        ] = {}

    def next(self, request: StepRequest, followed_by: StepRequest | None) -> Program:
        """Return the program of the next step, given what follows it."""
        request, followed_by = request.canonical, followed_by.canonical if followed_by else None
        cache_key = (self.residency.snapshot(), request, followed_by)
        if cache_key not in self._programs:
            program = self.residency.program(self._tasks(request), self._tasks(followed_by) if followed_by else ())
            if len(self._programs) == MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[cache_key] = program, self.residency.snapshot()
        program, state_after = self._programs[cache_key]
        self.residency.restore(state_after)
        return program

    def buffer_of(self, key: BufferKey) -> int | None:
        """Return the device buffer of a bucket; none: it is on the host."""
        return self.residency.where.get(key)

    @property
    def on_disk(self) -> set[BufferKey]:
        """Buckets that live on disk."""
        return self.residency.on_disk

    def host_slot_of(self, key: BufferKey) -> int:
        """Return the host slot of a bucket."""
        return self.residency.host_slots[key]

    def with_state(self) -> None:
        """Mark optimizer state as existing from the start, as when a run is resumed."""
        at_home = {*self.residency.host_slots, *self.residency.on_disk}
        self.residency.on_host |= {key for key in at_home if key.kind == "state"}


def _tasks(model: Model, plan: Plan, request: StepRequest) -> list[StepTask]:
    return (pending_updates if request.only_updates else step_tasks)(model, plan, request.start)
