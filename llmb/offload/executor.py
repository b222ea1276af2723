"""Issues a program to three lanes: copies in, computations, copies home, each with what it waits for.

    executor = Executor(arena, lanes)
    executor.follow(program, compute)           # compute(operation) does one computation, on its lane

Nothing is waited for here: the lanes wait for one another. A watch, where there is one, sees every entry begin and end.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from llmb.offload.arena import Arena
from llmb.offload.cuda_streams import Lanes, Moment
from llmb.perfmodel.offload.program import Copy, Operation, Program
from llmb.perfmodel.offload.step_tasks import Work
from llmb.perfmodel.offload.stream_timeline import Lane

Compute = Callable[[Operation], None]


class Watch(Protocol):
    """Told of every entry of every lane, when it is done; a computation has no copy."""

    def __call__(self, lane: Lane, work: Work, copy: Copy | None, start: Moment, end: Moment) -> None: ...


class Executor:
    """Of one arena and its lanes."""

    def __init__(self, arena: Arena, lanes: Lanes):
        self.arena, self.lanes = arena, lanes

    def follow(
        self,
        program: Program,
        compute: Compute,
        watch: Watch | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Issue all of a program; `between` is called now and then, and should not wait for anything."""
        self._check_homes(program)
        self.lanes.begin()
        for copy in program.first_sends:
            self._send(copy, program.operations[0].work, watch)
        for operation in program.operations:
            for copy in operation.brings:
                self._bring(copy, operation.work, watch)
            waits: dict[Lane, int] = {"inbound": operation.wait_inbound, "outbound": operation.wait_outbound}
            self._enter("compute", partial(compute, operation), waits, operation.work, None, watch)
            for copy in operation.sends:
                self._send(copy, operation.work, watch)
            between()

    def _bring(self, copy: Copy, work: Work, watch: Watch | None) -> None:
        waits: dict[Lane, int] = {"compute": copy.wait_compute, "outbound": copy.wait_other}
        self._enter("inbound", partial(self._copy_in, copy), waits, work, copy, watch)

    def _send(self, copy: Copy, work: Work, watch: Watch | None) -> None:
        waits: dict[Lane, int] = {"compute": copy.wait_compute, "inbound": copy.wait_other}
        self._enter("outbound", partial(self._copy_home, copy), waits, work, copy, watch)

    def _copy_in(self, copy: Copy) -> None:
        home = self.arena.home(copy.piece.kind, copy.home)
        self.arena.buffer(copy.piece.kind, copy.buffer).copy_(home, non_blocking=True)

    def _copy_home(self, copy: Copy) -> None:
        buffer = self.arena.buffer(copy.piece.kind, copy.buffer)
        self.arena.home(copy.piece.kind, copy.home).copy_(buffer, non_blocking=True)

    def _enter(
        self, lane: Lane, action: Callable[[], None], waits: dict[Lane, int], work: Work, copy: Copy | None,
        watch: Watch | None,
    ) -> None:  # fmt: skip
        if watch is None:
            self.lanes.enter(lane, action, waits)
        else:
            self.lanes.enter(lane, partial(self._watched, lane, action, work, copy, watch), waits)

    def _watched(self, lane: Lane, action: Callable[[], None], work: Work, copy: Copy | None, watch: Watch) -> None:
        start = self.lanes.moment(lane)
        action()
        watch(lane, work, copy, start, self.lanes.moment(lane))

    def _check_homes(self, program: Program) -> None:
        lacking = {kind: count for kind, count in program.homes.items() if count > self.arena.homes[kind]}
        assert not lacking, f"places at home for {lacking}, more than were foreseen: {self.arena.homes}"
