"""A plan's numbers on their way to the device: gathered by numpy into pinned memory, then two copies, whatever the step.

    layout = StepLayout(tokens, parts, samples, blocks)
    staging.fill(plan, layout) -> StepTensors on the device

The host may plan the next step while the copies of this one are still under way, so buffers are used in turn.

Shapes: N tokens, P parts, S parts that sample, M blocks of the longest sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from llmb.infer.step import Inputs, Plan

TURNS = 4  # buffers; more than steps that can be under way


@dataclass(frozen=True)
class Sizes:
    """How large a step's tensors are; a padded step has more of everything than its plan."""

    tokens: int
    parts: int
    samples: int

    @property
    def longs(self) -> int:
        return 3 * self.tokens + self.parts + 2 * self.samples

    def ints(self, blocks: int) -> int:
        return 2 * self.parts + 1 + self.parts * blocks


@dataclass(frozen=True)
class StepTensors:
    """A step on the device."""

    tokens_N: Tensor  # int64; -1 - slot: the newest token of that slot, which the host does not know yet
    rows_S: Tensor  # int64, which of the N give a token
    targets_S: Tensor  # int64, whose newest token that is
    inputs: Inputs


def cut(longs: Tensor, ints: Tensor, sizes: Sizes, plan: Plan, longest: int, decodes: int) -> StepTensors:
    """Two runs of numbers as the tensors of a step."""
    n, p, s = sizes.tokens, sizes.parts, sizes.samples
    tokens_N, positions_N, places_N, slots_P, rows_S, targets_S = longs[: sizes.longs].split((n, n, n, p, s, s))
    starts_P1, lengths_P = ints[: p + 1], ints[p + 1 : 2 * p + 1]
    inputs = Inputs(
        positions_N=positions_N,
        places_N=places_N,
        slots_P=slots_P,
        starts_P1=starts_P1,
        lengths_P=lengths_P,
        table_PM=ints[2 * p + 1 :].view(p, -1),
        decodes=decodes,
        longest_part=max((part.count for part in plan.parts), default=0),
        longest=longest,
        parts=tuple((part.start, part.count) for part in plan.parts[decodes:]),
    )
    return StepTensors(tokens_N, rows_S, targets_S, inputs)


class Staging:
    """Where plans become tensors. `slots`: sequences that may run; slot number `slots` is nobody's, for padding."""

    def __init__(self, slots: int, blocks: int, block_tokens: int, most_tokens: int, device: torch.device):
        self.slots, self.blocks, self.block_tokens, self.device = slots, blocks, block_tokens, device
        self._table = np.zeros((slots, blocks), dtype=np.int32)  # of each slot
        most = Sizes(most_tokens, slots, slots)
        pin = device.type == "cuda"
        self._turns: Iterator[tuple[Tensor, Tensor]] = cycle(
            (
                torch.empty(most.longs, dtype=torch.int64, pin_memory=pin),
                torch.empty(most.ints(blocks), dtype=torch.int32, pin_memory=pin),
            )
            for _ in range(TURNS)
        )

    def load(self, plan: Plan, longs: Tensor, ints: Tensor, sizes: Sizes, blocks: int) -> None:
        """Write the plan, padded to `sizes`, into two tensors on the device; does not wait."""
        host_longs, host_ints = next(self._turns)
        count_longs, count_ints = sizes.longs, sizes.ints(blocks)
        self._gather(plan, host_longs.numpy()[:count_longs], host_ints.numpy()[:count_ints], sizes, blocks)
        longs[:count_longs].copy_(host_longs[:count_longs], non_blocking=True)
        ints[:count_ints].copy_(host_ints[:count_ints], non_blocking=True)

    def _gather(self, plan: Plan, longs: np.ndarray, ints: np.ndarray, sizes: Sizes, blocks: int) -> None:
        n, p, s = sizes.tokens, sizes.parts, sizes.samples
        ends = np.cumsum((n, n, n, p, s))
        tokens, positions, places, slots, rows, targets = np.split(longs, ends)
        counts = np.fromiter((part.count for part in plan.parts), np.int64, len(plan.parts))
        firsts = np.fromiter((part.start for part in plan.parts), np.int64, len(plan.parts))
        own = np.fromiter((part.sequence.slot for part in plan.parts), np.int64, len(plan.parts))
        starts = np.concatenate(([0], np.cumsum(counts)))
        real, parts = int(starts[-1]), len(plan.parts)
        self._sync(plan)
        tokens[:real] = [token for part in plan.parts for token in _tokens(part.sequence, part.start, part.end)]
        tokens[real:] = 0
        within = np.arange(real) - np.repeat(starts[:-1], counts)
        positions[:real] = np.repeat(firsts, counts) + within
        positions[real:] = 0
        block, offset = np.divmod(positions[:real], self.block_tokens)
        places[:real] = self._table[np.repeat(own, counts), block].astype(np.int64) * self.block_tokens + offset
        places[real:] = -1
        slots[:parts], slots[parts:] = own, self.slots
        chosen = np.flatnonzero(np.fromiter((part.samples for part in plan.parts), np.bool_, parts))
        rows[: len(chosen)], rows[len(chosen) :] = starts[1:][chosen] - 1, 0
        targets[: len(chosen)], targets[len(chosen) :] = own[chosen], self.slots
        ints[: parts + 1] = starts
        ints[parts + 1 : p + 1] = real + np.arange(1, p - parts + 1)  # padding: one token each, like a decode
        ints[p + 1 : p + 1 + parts] = firsts + counts
        ints[p + 1 + parts : 2 * p + 1] = 0
        ints[2 * p + 1 :].reshape(p, blocks)[:parts] = self._table[own, :blocks]

    def _sync(self, plan: Plan) -> None:
        """Blocks that sequences have got since they were last seen."""
        for part in plan.parts:
            sequence = part.sequence
            if sequence.synced != len(sequence.blocks):
                new = sequence.blocks[sequence.synced :]
                self._table[sequence.slot, sequence.synced : len(sequence.blocks)] = new
                sequence.synced = len(sequence.blocks)


def _tokens(sequence, start: int, end: int) -> list[int]:  # type: ignore[no-untyped-def]
    known = sequence.tokens[start:end]
    return known if len(known) == end - start else [*known, -1 - sequence.slot]
