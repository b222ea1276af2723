"""Executor of programs: issues copies in, tasks and copies out to three streams, each with what it waits for.

    executor = Executor(arena, streams, disk=None)
    executor.run(program, compute)              # compute(operation) computes one task, on its stream

Nothing is waited for here but the disk: the streams wait for one another. An observer, if any, gets every entry.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from llmb.offload.arena import Arena
from llmb.offload.cuda_streams import StreamEvent, Streams
from llmb.offload.disk.disk_tier import DiskTier, Transferred
from llmb.perfmodel.offload.program import Copy, Operation, Program
from llmb.perfmodel.offload.step_tasks import StepTask
from llmb.perfmodel.offload.stream_timeline import StreamName

Compute = Callable[[Operation], None]


class StreamObserver(Protocol):
    """Called for every entry of every stream, when it is issued; a computation has no copy.

    Transfers of a disk are reported when they are done, by the threads that make them.
    """

    def __call__(
        self, stream: StreamName, task: StepTask, copy: Copy | None, start: StreamEvent, end: StreamEvent
    ) -> None: ...


class Executor:
    """Executor of one arena and its streams, and of the disk tier if the plan has one."""

    def __init__(self, arena: Arena, streams: Streams, disk: DiskTier | None = None):
        self.arena, self.streams, self.disk = arena, streams, disk
        self._to_read: deque[tuple[Copy, StepTask]] = deque()  # copies in whose reads were not issued yet
        self._num_copied_out = 0  # copies out that were issued, of the current program

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
        self._to_read, self._num_copied_out = deque(program.staged_copies_in), 0
        if self.disk is not None:
            self._read_ahead(self.disk, observer)
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
        key, disk = copy.key, self.disk
        opposite: StreamName = "outbound" if stream == "inbound" else "inbound"
        waits: dict[StreamName, int] = {"compute": copy.wait_compute, opposite: copy.wait_other}
        if not copy.is_staged:
            memory = self.arena.host_slot(key.kind, copy.host_slot)
        else:
            assert disk is not None, f"{key} lives on disk, and there is none"
            memory = disk.next_read(key) if stream == "inbound" else disk.write_buffer(key)
        self._issue(stream, partial(self._copy, stream, copy, memory), waits, task, copy, observer)
        self._num_copied_out += stream == "outbound"
        if copy.is_staged and disk is not None:
            copied = self.streams.record_event(stream)
            if stream == "inbound":
                disk.release(key, memory, copied)
            else:
                disk.write_behind(key, memory, copied, _transferred("disk_write", task, copy, observer))
            self._read_ahead(disk, observer)

    def _copy(self, stream: StreamName, copy: Copy, memory: Tensor) -> None:
        buffer = self.arena.buffer(copy.key.kind, copy.buffer)
        memory = memory[: buffer.numel()]
        target, source = (buffer, memory) if stream == "inbound" else (memory, buffer)
        target.copy_(source, non_blocking=True)

    def _read_ahead(self, disk: DiskTier, observer: StreamObserver | None) -> None:
        """Issue the next reads, in order, as far as what they wait for was issued."""
        while self._to_read:
            copy, task = self._to_read[0]
            if copy.after_write >= self._num_copied_out or not disk.can_read_ahead(copy.key):
                return
            disk.read_ahead(copy.key, _transferred("disk_read", task, copy, observer))
            self._to_read.popleft()

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


def _transferred(stream: StreamName, task: StepTask, copy: Copy, observer: StreamObserver | None) -> Transferred | None:
    return None if observer is None else partial(observer, stream, task, copy)
