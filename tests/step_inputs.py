"""Hand-built StepInputs of a list of chunks, without a scheduler or a runner."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from llmb.serve.step_batch import StepInputs

CPU = torch.device("cpu")


class StepChunk(NamedTuple):
    """Positions start to start + count of the sequence that has this slot and these blocks."""

    slot: int
    blocks: Sequence[int]
    start: int
    count: int


def step_inputs(
    tuples: Sequence[tuple[int, Sequence[int], int, int]],
    block_tokens: int,
    padding: int = 0,
    decodes: int | None = None,
    device: torch.device = CPU,
) -> StepInputs:
    """Return the inputs of (slot, blocks, start, count) chunks. Leading chunks of one token are decodes unless their
    number is given. `padding`: so many decodes of no sequence after them, with slot 0."""
    all_chunks = [StepChunk(*chunk) for chunk in tuples]
    if decodes is None:
        decodes = next((index for index, chunk in enumerate(all_chunks) if chunk.count != 1), len(all_chunks))
    assert all(chunk.count == 1 for chunk in all_chunks[:decodes])
    rows = [(chunk, chunk.start + chunk.count) for chunk in all_chunks]
    rows[decodes:decodes] = [(StepChunk(0, (), 0, 1), 0)] * padding
    positions, slot_mapping, starts = [], [], [0]
    for chunk, length in rows:
        chunk_positions = range(chunk.start, chunk.start + chunk.count)
        positions += chunk_positions
        slot_mapping += [
            chunk.blocks[at // block_tokens] * block_tokens + at % block_tokens if length else -1
            for at in chunk_positions
        ]
        starts.append(starts[-1] + chunk.count)
    max_blocks = max([1, *(len(chunk.blocks) for chunk in all_chunks)])
    table = [[*chunk.blocks, *[0] * (max_blocks - len(chunk.blocks))] for chunk, _ in rows]
    chunks = all_chunks[decodes:]

    def whole(numbers: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    return StepInputs(
        positions_N=whole(positions, torch.int64),
        slot_mapping_N=whole(slot_mapping, torch.int64),
        slots_P=whole([chunk.slot for chunk, _ in rows], torch.int64),
        cu_seqlens_P1=whole(starts, torch.int32),
        seq_lens_P=whole([length for _, length in rows], torch.int32),
        block_table_PM=whole(table, torch.int32).view(len(rows), max_blocks),
        num_decodes=decodes + padding,
        max_query_len=max([0, *(chunk.count for chunk, _ in rows)]),
        max_seq_len=max([0, *(length for _, length in rows)]),
        prefill_chunks=tuple((chunk.start, chunk.count) for chunk in chunks),
    )
