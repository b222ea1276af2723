"""What the three lanes of an out-of-core run do, in an order that can be issued from one thread without ever waiting.

An operation is one computation, with the copies that bring what it needs issued before it and the copies that take home
what it was the last to use issued behind it. Each lane works in its own order; waiting for another lane means waiting
for its n-th entry. Entries are counted from the program's first; those of the program before have negative numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

from llmb.perfmodel.offload.buffers import Piece
from llmb.perfmodel.offload.step_tasks import Work

BEFORE_ALL = -(1 << 60)  # an entry that was done long ago


class Copy(NamedTuple):
    """One piece between its buffer on the device and its place at home."""

    piece: Piece
    buffer: int  # of its kind
    home: int  # of its kind
    wait_compute: int  # entries of other lanes that must be done before
    wait_other: int  # of the other copying lane


class Operation(NamedTuple):
    """One computation and the copies around it."""

    work: Work
    buffers: dict[Piece, int]  # of every piece that the work names
    brings: tuple[Copy, ...]
    sends: tuple[Copy, ...]
    wait_inbound: int
    wait_outbound: int


@dataclass(frozen=True)
class Program:
    """A step, or the updates that were left of it."""

    first_sends: tuple[Copy, ...]  # of what the program before was the last to use
    operations: tuple[Operation, ...]
    homes: dict[str, int]  # places that the kinds without one of their own need at home, most at once

    @property
    def brought(self) -> int:
        return sum(len(operation.brings) for operation in self.operations)

    @property
    def sent(self) -> int:
        return len(self.first_sends) + sum(len(operation.sends) for operation in self.operations)
