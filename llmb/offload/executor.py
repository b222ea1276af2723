"""Executor of programs: issues copies in, tasks and copies out to three streams, each with what it waits for.

    executor = Executor(arena, streams)
    executor.run(program, compute)              # compute(operation) computes one task, on its stream

Nothing is waited for here: the streams wait for one another. An observer, if any, is told of every entry.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from llmb.offload.arena import Arena
from llmb.offload.cuda_streams import StreamEvent, Streams
from llmb.perfmodel.offload.program import Copy, Operation, Program
from llmb.perfmodel.offload.step_tasks import StepTask
from llmb.perfmodel.offload.stream_timeline import StreamName

Compute = Callable[[Operation], None]


class StreamObserver(Protocol):
    """Called for every entry of every stream, when it is issued; a computation has no copy."""

    def __call__(
        self, stream: StreamName, task: StepTask, copy: Copy | None, start: StreamEvent, end: StreamEvent
    ) -> None: ...


class Executor:
    """Executor of one arena and its streams."""

    def __init__(self, arena: Arena, streams: Streams):
        self.arena, self.streams = arena, streams

    def run(
        self,
        program: Program,
        compute: Compute,
        observer: StreamObserver | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Issue all of a program; `poll` is called after each task, and must not wait for anything."""
        self._check_host_slots(program)
        self.streams.begin()
        for copy in program.first_copies_out:
            self._issue_copy("outbound", copy, program.operations[0].task, observer)
        for operation in program.operations:
            for copy in operation.copies_in:
                self._issue_copy("inbound", copy, operation.task, observer)
            waits: dict[StreamName, int] = {"inbound": operation.wait_inbound, "outbound": operation.wait_outbound}
            self._issue("compute", partial(compute, operation), waits, operation.task, None, observer)
            for copy in operation.copies_out:
                self._issue_copy("outbound", copy, operation.task, observer)
            poll()

    def _issue_copy(self, stream: StreamName, copy: Copy, task: StepTask, observer: StreamObserver | None) -> None:
        opposite: StreamName = "outbound" if stream == "inbound" else "inbound"
        waits: dict[StreamName, int] = {"compute": copy.wait_compute, opposite: copy.wait_other}
        self._issue(stream, partial(self._copy, stream, copy), waits, task, copy, observer)

    def _copy(self, stream: StreamName, copy: Copy) -> None:
        buffer = self.arena.buffer(copy.key.kind, copy.buffer)
        host_slot = self.arena.host_slot(copy.key.kind, copy.host_slot)
        target, source = (buffer, host_slot) if stream == "inbound" else (host_slot, buffer)
        target.copy_(source, non_blocking=True)

    def _issue(
        self, stream: StreamName, action: Callable[[], None], waits: dict[StreamName, int], task: StepTask,
        copy: Copy | None, observer: StreamObserver | None,
    ) -> None:  # fmt: skip
        if observer is not None:
            action = partial(self._observed, stream, action, task, copy, observer)
        self.streams.enter(stream, action, waits)

    def _observed(
        self, stream: StreamName, action: Callable[[], None], task: StepTask, copy: Copy | None,
        observer: StreamObserver,
    ) -> None:  # fmt: skip
        start = self.streams.record_event(stream)
        action()
        observer(stream, task, copy, start, self.streams.record_event(stream))

    def _check_host_slots(self, program: Program) -> None:
        lacking = {kind: count for kind, count in program.host_slots.items() if count > self.arena.host_slots[kind]}
        assert not lacking, f"the program needs host slots {lacking}, the arena has {self.arena.host_slots}"
