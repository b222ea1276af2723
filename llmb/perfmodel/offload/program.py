"""Program of the three streams of an out-of-core run, in an order that one thread can issue without ever waiting.

An operation is one task, with the copies that bring its inputs issued before it, and the copies to the host of what it
was the last to use issued behind it. Each stream works in order; waiting for another stream means waiting for its n-th
entry. Entries are counted from the program's first; those of the previous program have negative numbers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from llmb.perfmodel.offload.buffers import BufferKey
from llmb.perfmodel.offload.step_tasks import StepTask

BEFORE_ALL = -(1 << 60)  # an entry that was done long ago
STAGED = -1


class Copy(NamedTuple):
    """Copy between a device buffer and a host slot, or for a bucket on disk a staging buffer.

    A staging buffer is read from disk before a copy in, and written to disk behind a copy out.
    """

    key: BufferKey
    buffer: int  # index within its kind
    host_slot: int  # index within its kind; STAGED: a staging buffer, in turn
    wait_compute: int  # entries of other streams that must be done before
    wait_other: int  # of the other copy stream
    after_write: int = BEFORE_ALL  # copy out whose write to disk comes before the read of a copy in

    @property
    def is_staged(self) -> bool:
        """Return whether the bucket lives on disk."""
        return self.host_slot == STAGED


class Operation(NamedTuple):
    """One task and the copies around it."""

    task: StepTask
    buffers: dict[BufferKey, int]  # device buffer of every key that the task names
    copies_in: tuple[Copy, ...]
    copies_out: tuple[Copy, ...]
    wait_inbound: int
    wait_outbound: int


@dataclass(frozen=True)
class Program:
    """A step, or its pending updates alone."""

    first_copies_out: tuple[Copy, ...]  # of what the previous program was the last to use
    operations: tuple[Operation, ...]
    host_slots: dict[str, int]  # peak number of slots of the kinds that share them

    @cached_property
    def staged_copies_in(self) -> tuple[tuple[Copy, StepTask], ...]:
        """Copies in of buckets on disk, in order, with their tasks."""
        operations = self.operations
        return tuple((copy, op.task) for op in operations for copy in op.copies_in if copy.is_staged)

    @property
    def num_copies_in(self) -> int:
        return sum(len(operation.copies_in) for operation in self.operations)

    @property
    def num_copies_out(self) -> int:
        return len(self.first_copies_out) + sum(len(operation.copies_out) for operation in self.operations)
