"""Steps built by hand: the Inputs of a list of parts, without a scheduler or a runner."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from llmb.serve.step_batch import Inputs

CPU = torch.device("cpu")


class Piece(NamedTuple):
    """Positions start to start + count of the sequence that has this slot and these blocks."""

    slot: int
    blocks: Sequence[int]
    start: int
    count: int


def step_inputs(
    pieces: Sequence[tuple[int, Sequence[int], int, int]],
    block_tokens: int,
    padding: int = 0,
    decodes: int | None = None,
    device: torch.device = CPU,
) -> Inputs:
    """A step of (slot, blocks, start, count), in which those of one token that come first are the decodes, if it is not
    said how many are. Padding: so many more decodes after them, of no sequence, whose slot is 0."""
    parts = [Piece(*piece) for piece in pieces]
    if decodes is None:
        decodes = next((place for place, part in enumerate(parts) if part.count != 1), len(parts))
    assert all(part.count == 1 for part in parts[:decodes])
    rows = [(part, part.start + part.count) for part in parts]
    rows[decodes:decodes] = [(Piece(0, (), 0, 1), 0)] * padding
    positions, places, starts = [], [], [0]
    for part, length in rows:
        spots = range(part.start, part.start + part.count)
        positions += spots
        places += [part.blocks[at // block_tokens] * block_tokens + at % block_tokens if length else -1 for at in spots]
        starts.append(starts[-1] + part.count)
    widest = max([1, *(len(part.blocks) for part in parts)])
    table = [[*part.blocks, *[0] * (widest - len(part.blocks))] for part, _ in rows]
    chunks = parts[decodes:]

    def whole(numbers: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    return Inputs(
        positions_N=whole(positions, torch.int64),
        places_N=whole(places, torch.int64),
        slots_P=whole([part.slot for part, _ in rows], torch.int64),
        starts_P1=whole(starts, torch.int32),
        lengths_P=whole([length for _, length in rows], torch.int32),
        table_PM=whole(table, torch.int32).view(len(rows), widest),
        decodes=decodes + padding,
        longest_part=max([0, *(part.count for part, _ in rows)]),
        longest=max([0, *(length for _, length in rows)]),
        parts=tuple((part.start, part.count) for part in chunks),
    )
