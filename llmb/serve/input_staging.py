"""A plan's numbers on their way to the device: gathered by numpy in pinned memory, then two copies, whatever the step.

    buffer = StepBuffer.on(device, Sizes(tokens=12, parts=3, samples=2, blocks=4))
    staging.load(plan, buffer)
    inputs = buffer.inputs(plan, longest=60, decodes=plan.decodes)

The host may plan the next step while the copies of this one are still under way, so its own buffers are used in turn.

Shapes: N tokens, P parts, S parts that sample, M blocks of the longest sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from llmb.serve.request import Sequence
from llmb.serve.step_batch import Inputs, Part, Plan

TURNS = 4  # buffers of the host; more than steps that can be under way


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large a step's tensors are; a padded step has more of everything than its plan."""

    tokens: int
    parts: int
    samples: int
    blocks: int  # of a row of the table

    @property
    def longs(self) -> int:
        return 3 * self.tokens + self.parts + 2 * self.samples

    @property
    def ints(self) -> int:
        return 2 * self.parts + 1 + self.parts * self.blocks


class StepBuffer:
    """The numbers of one step, in two runs of memory: one of int64, one of int32."""

    def __init__(self, longs: Tensor, ints: Tensor, sizes: Sizes):
        n, p, s = sizes.tokens, sizes.parts, sizes.samples
        self.longs, self.ints, self.sizes = longs[: sizes.longs], ints[: sizes.ints], sizes
        # A token of -1 - slot is the newest of that slot, which the host does not know yet. Rows are those of the N
        # that give a token, targets the slots whose newest it becomes.
        self.tokens_N, self.positions_N, self.places_N, self.slots_P, self.rows_S, self.targets_S = self.longs.split(
            (n, n, n, p, s, s)
        )
        self.starts_P1, self.lengths_P, table = self.ints.split((p + 1, p, p * sizes.blocks))
        self.table_PM = table.view(p, sizes.blocks)

    @classmethod
    def on(cls, device: torch.device, sizes: Sizes) -> "StepBuffer":
        longs = torch.empty(sizes.longs, dtype=torch.int64, device=device)
        return cls(longs, torch.empty(sizes.ints, dtype=torch.int32, device=device), sizes)

    def inputs(self, plan: Plan, longest: int, decodes: int) -> Inputs:
        """What layers read of it. No sequence is longer than `longest`; the first `decodes` parts have one token."""
        return Inputs(
            positions_N=self.positions_N,
            places_N=self.places_N,
            slots_P=self.slots_P,
            starts_P1=self.starts_P1,
            lengths_P=self.lengths_P,
            table_PM=self.table_PM,
            decodes=decodes,
            longest_part=max((part.count for part in plan.parts), default=0),
            longest=longest,
            parts=tuple((part.start, part.count) for part in plan.parts[decodes:]),
        )


class Staging:
    """Where plans become tensors. `slots`: sequences that may run; slot number `slots` is nobody's, for padding."""

    def __init__(
        self, slots: int, blocks: int, block_tokens: int, most_tokens: int, device: torch.device, turns: int = TURNS
    ):
        self.slots, self.blocks, self.block_tokens, self.device = slots, blocks, block_tokens, device
        self._table = np.zeros((slots, blocks), dtype=np.int32)  # of each slot
        most = Sizes(tokens=max(most_tokens, slots), parts=slots, samples=slots, blocks=blocks)
        pin = device.type == "cuda"
        self._turns: Iterator[tuple[Tensor, Tensor]] = cycle(
            (
                torch.empty(most.longs, dtype=torch.int64, pin_memory=pin),
                torch.empty(most.ints, dtype=torch.int32, pin_memory=pin),
            )
            for _ in range(turns)
        )

    def load(self, plan: Plan, buffer: StepBuffer) -> None:
        """Write the plan, padded to the buffer's sizes, into a buffer on the device; does not wait."""
        host = StepBuffer(*next(self._turns), buffer.sizes)
        self._note_blocks(plan)
        self._gather(plan.parts, host)
        buffer.longs.copy_(host.longs, non_blocking=True)
        buffer.ints.copy_(host.ints, non_blocking=True)

    def _gather(self, parts: list[Part], host: StepBuffer) -> None:
        counts_P = np.fromiter((part.count for part in parts), np.int64, len(parts))
        firsts_P = np.fromiter((part.start for part in parts), np.int64, len(parts))
        slots_P = np.fromiter((part.sequence.slot for part in parts), np.int64, len(parts))
        sampling_S = np.flatnonzero(np.fromiter((part.samples for part in parts), np.bool_, len(parts)))
        starts_P1 = np.concatenate(([0], np.cumsum(counts_P)))
        positions_N = np.arange(starts_P1[-1]) + np.repeat(firsts_P - starts_P1[:-1], counts_P)
        block_N, offset_N = np.divmod(positions_N, self.block_tokens)
        places_N = self._table[np.repeat(slots_P, counts_P), block_N].astype(np.int64) * self.block_tokens + offset_N
        more_P = np.arange(1, host.sizes.parts - len(parts) + 1)

        _put(host.tokens_N, [token for part in parts for token in _tokens(part.sequence, part.start, part.end)], 0)
        _put(host.positions_N, positions_N, 0)
        _put(host.places_N, places_N, -1)
        _put(host.slots_P, slots_P, self.slots)
        _put(host.rows_S, starts_P1[1:][sampling_S] - 1, 0)
        _put(host.targets_S, slots_P[sampling_S], self.slots)
        _put(host.starts_P1, starts_P1, starts_P1[-1] + more_P)  # padding: one token each, like a decode
        _put(host.lengths_P, firsts_P + counts_P, 0)
        host.table_PM.numpy()[: len(parts)] = self._table[slots_P, : host.sizes.blocks]

    def _note_blocks(self, plan: Plan) -> None:
        """Blocks that sequences have got since they were last seen."""
        for part in plan.parts:
            sequence = part.sequence
            if sequence.synced != len(sequence.blocks):
                new = sequence.blocks[sequence.synced :]
                self._table[sequence.slot, sequence.synced : len(sequence.blocks)] = new
                sequence.synced = len(sequence.blocks)


def _put(there: Tensor, values: np.ndarray | list[int], padding: ArrayLike) -> None:
    array = there.numpy()
    array[: len(values)] = values
    array[len(values) :] = padding


def _tokens(sequence: Sequence, start: int, end: int) -> list[int]:
    """Those the host knows, and in place of the newest, if it does not know that, where the device has it."""
    known = sequence.tokens[start:end]
    return known if len(known) == end - start else [*known, -1 - _slot(sequence)]


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "only sequences that run are computed"
    return sequence.slot
