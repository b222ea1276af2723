"""Staging of a batch for the device: numpy fills pinned host buffers, then two H2D copies, whatever the step.

    sizes = StepSizes(num_tokens=12, num_decodes=2, num_prefills=1, num_samples=2, num_blocks=4)
    buffer = StepBuffer.on(device, sizes)
    staging.upload(batch, buffer)
    inputs = buffer.inputs(batch, max_seq_len=60, num_decodes=batch.num_decodes)

The host may schedule the next step while the copies of this one are still running, so its buffers are used in turn.

Shapes: N tokens, P sequences, S sampling sequences, M blocks of the longest sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.gemm.skinny_gemm import MAX_TOKENS
from llmb.serve.request import Sequence
from llmb.serve.step_batch import ScheduledChunk, StepBatch, StepInputs

NUM_HOST_BUFFERS = 4  # more than steps that can be launched at once


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of a step's tensors; a padded step has more of everything than its batch."""

    num_tokens: int
    num_decodes: int  # sequences with one token each, which come first
    num_prefills: int
    num_samples: int
    num_blocks: int  # of a row of a block table
    num_tables: int = 1  # block tables: two if layers with a sliding window have blocks of their own

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_prefills

    @property
    def num_int64(self) -> int:
        return (2 + self.num_tables) * self.num_tokens + self.num_seqs + 2 * self.num_samples

    @property
    def num_int32(self) -> int:
        return 2 * self.num_seqs + 1 + self.num_tables * self.num_seqs * self.num_blocks


class StepBuffer:
    """The inputs of one step in two contiguous buffers, one of int64 and one of int32."""

    def __init__(self, int64s: Tensor, int32s: Tensor, sizes: StepSizes):
        n, p, s, tables = sizes.num_tokens, sizes.num_seqs, sizes.num_samples, sizes.num_tables
        self.int64s, self.int32s, self.sizes = int64s[: sizes.num_int64], int32s[: sizes.num_int32], sizes
        views = self.int64s.split((n, n, n, p, s, s, *[n] * (tables - 1)))
        # A token of -1 - i stands for the i-th of the tokens that only the device has: the last of slot i, or a draft
        # (`InputStaging`). Sampled tokens come from the rows `logits_indices_S` of the N and become those of the
        # indices `sample_slots_S`.
        self.tokens_N, self.positions_N, slot_mapping_N, self.slots_P = views[:4]
        self.logits_indices_S, self.sample_slots_S = views[4:6]
        self.slot_mappings = (slot_mapping_N, *views[6:])  # of all layers, or of full and windowed ones
        self.cu_seqlens_P1, self.seq_lens_P, *tables_PM = self.int32s.split(
            (p + 1, p, *[p * sizes.num_blocks] * tables)
        )
        self.block_tables = [table.view(p, sizes.num_blocks) for table in tables_PM]

    @classmethod
    def on(cls, device: torch.device, sizes: StepSizes) -> "StepBuffer":
        int64s = torch.empty(sizes.num_int64, dtype=torch.int64, device=device)
        return cls(int64s, torch.empty(sizes.num_int32, dtype=torch.int32, device=device), sizes)

    def inputs(
        self, batch: StepBatch, max_seq_len: int, num_decodes: int, max_query_len: int | None = None
    ) -> StepInputs:
        """Return the inputs of the layers. No sequence is longer than `max_seq_len`; the first `num_decodes` decode.

        With `max_query_len`, for a CUDA graph, no sequence has more tokens in this step; without, as the batch says.
        """
        metadata = AttentionMetadata(
            cu_seqlens_P1=self.cu_seqlens_P1,
            seq_lens_P=self.seq_lens_P,
            block_table_PM=self.block_tables[0],
            num_decodes=num_decodes,
            max_query_len=max_query_len or max((chunk.num_tokens for chunk in batch.chunks), default=0),
            max_seq_len=max_seq_len,
            prefill_chunks=tuple((chunk.start, chunk.num_tokens) for chunk in batch.chunks[num_decodes:]),
            padded_prefills=self.sizes.num_prefills if max_query_len else 0,
        )
        inputs = StepInputs(
            positions_N=self.positions_N,
            slot_mapping_N=self.slot_mappings[0],
            slots_P=self.slots_P,
            repeats_sequences=batch.repeats_sequences,
            **vars(metadata),
        )
        if self.sizes.num_tables == 1:
            return inputs
        window_metadata = replace(metadata, block_table_PM=self.block_tables[1])
        return replace(inputs, window_metadata=window_metadata, window_slot_mapping_N=self.slot_mappings[1])


class InputStaging:
    """Host buffers and block tables. `slots`: sequences that may run; slot number `slots` is reserved for padding.

    `max_padding`: rows of padding that a step may have beyond `max_rows`. `num_tables`: as in StepSizes. `num_drafts`:
    draft tokens of a sequence, each of them a row of its own.
    """

    def __init__(
        self,
        slots: int,
        num_blocks: int,
        block_tokens: int,
        max_num_tokens: int,
        device: torch.device,
        num_buffers: int = NUM_HOST_BUFFERS,
        max_padding: int = 0,
        num_tables: int = 1,
        num_drafts: int = 0,
    ):
        self.max_rows = max_rows(slots, num_drafts)
        self.num_drafts = num_drafts
        self.slots, self.num_blocks, self.block_tokens, self.device = slots, num_blocks, block_tokens, device
        self.num_tables = num_tables
        self._block_tables = np.zeros((num_tables, slots, num_blocks), dtype=np.int32)  # of each slot
        sizes = StepSizes(
            num_tokens=max(max_num_tokens, slots) + (self.max_rows if num_drafts else 0),
            num_decodes=self.max_rows,
            num_prefills=max_padding,
            num_samples=self.max_rows,
            num_blocks=num_blocks,
            num_tables=num_tables,
        )
        pin = device.type == "cuda"
        self._host_buffers: Iterator[tuple[Tensor, Tensor]] = cycle(
            (
                torch.empty(sizes.num_int64, dtype=torch.int64, pin_memory=pin),
                torch.empty(sizes.num_int32, dtype=torch.int32, pin_memory=pin),
            )
            for _ in range(num_buffers)
        )

    def upload(self, batch: StepBatch, buffer: StepBuffer) -> None:
        """Copy the batch, padded to the buffer's sizes, into a buffer on the device; does not wait."""
        host = StepBuffer(*next(self._host_buffers), buffer.sizes)
        self._update_block_tables(batch)
        self._fill(batch, host)
        buffer.int64s.copy_(host.int64s, non_blocking=True)
        buffer.int32s.copy_(host.int32s, non_blocking=True)

    def _fill(self, batch: StepBatch, host: StepBuffer) -> None:
        chunks, num_decodes, sizes = batch.chunks, batch.num_decodes, host.sizes
        counts_P = np.fromiter((chunk.num_tokens for chunk in chunks), np.int64, len(chunks))
        firsts_P = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
        slots_P = np.fromiter((chunk.sequence.slot for chunk in chunks), np.int64, len(chunks))
        sampling_S = np.flatnonzero(np.fromiter((chunk.samples for chunk in chunks), np.bool_, len(chunks)))
        cu_seqlens_P1 = np.concatenate(([0], np.cumsum(counts_P)))
        positions_N = np.arange(cu_seqlens_P1[-1]) + np.repeat(firsts_P - cu_seqlens_P1[:-1], counts_P)
        block_N, offset_N = np.divmod(positions_N, self.block_tokens)
        slots_N = np.repeat(slots_P, counts_P)

        tokens_N = [token for chunk in chunks for token in self._tokens(chunk)]
        _fill_padded(host.tokens_N, tokens_N, 0)
        _fill_padded(host.positions_N, positions_N, 0)
        for table, slot_mapping_N in zip(self._block_tables, host.slot_mappings, strict=True):
            _fill_padded(slot_mapping_N, table[slots_N, block_N].astype(np.int64) * self.block_tokens + offset_N, -1)
        _fill_padded(host.logits_indices_S, cu_seqlens_P1[1:][sampling_S] - 1, 0)
        _fill_padded(host.sample_slots_S, self._sample_slots(batch, slots_P)[sampling_S], self.slots)

        # Decodes are padded to their number, then prefill chunks to theirs. The tokens of both are without a gap.
        rows_P = np.arange(len(chunks))
        rows_P[num_decodes:] += sizes.num_decodes - num_decodes
        _fill_rows(host.slots_P, rows_P, slots_P, self.slots)
        _fill_rows(host.seq_lens_P, rows_P, firsts_P + counts_P, 0)
        for table, block_table_PM in zip(self._block_tables, host.block_tables, strict=True):
            block_table_PM.numpy()[rows_P] = table[slots_P, : sizes.num_blocks]
        starts_P1 = host.cu_seqlens_P1.numpy()
        starts_P1[: sizes.num_decodes + 1] = np.arange(sizes.num_decodes + 1)
        if sizes.num_prefills:
            starts_P1[sizes.num_decodes :] = cu_seqlens_P1[-1]
            starts_P1[sizes.num_decodes :][: len(chunks) - num_decodes] = cu_seqlens_P1[num_decodes:-1]

    def _tokens(self, chunk: ScheduledChunk) -> list[int]:
        """Return the tokens of a chunk; -1 - i stands for one that only the device has, as its i-th last token."""
        if chunk.draft:
            return [-1 - chunk.draft * (self.slots + 1) - _slot(chunk.sequence)]
        tokens = chunk.sequence.token_ids[chunk.start : chunk.end]
        return tokens if len(tokens) == chunk.num_tokens else [*tokens, -1 - _slot(chunk.sequence)]

    def _sample_slots(self, batch: StepBatch, slots_P: np.ndarray) -> np.ndarray:
        """Return where the token that follows each chunk is stored: of slot s and draft i at i * (slots + 1) + s."""
        if not self.num_drafts:
            return slots_P
        drafts_P = np.fromiter((chunk.draft for chunk in batch.chunks), np.int64, len(batch.chunks))
        return slots_P + (drafts_P + batch.samples_drafts) * (self.slots + 1)

    def _update_block_tables(self, batch: StepBatch) -> None:
        """Add the blocks that sequences were given since their last step."""
        for chunk in batch.chunks:
            sequence = chunk.sequence
            first, last = sequence.num_synced_blocks, len(sequence.block_ids)
            if first != last:
                for table, blocks in zip(
                    self._block_tables, (sequence.block_ids, sequence.window_block_ids), strict=False
                ):
                    table[sequence.slot, first:last] = blocks[first:]
                sequence.num_synced_blocks = last


def _fill_padded(tensor: Tensor, values: np.ndarray | list[int], padding: ArrayLike) -> None:
    array = tensor.numpy()
    array[: len(values)] = values
    array[len(values) :] = padding


def _fill_rows(tensor: Tensor, rows: np.ndarray, values: np.ndarray, padding: int) -> None:
    array = tensor.numpy()
    array[:] = padding
    array[rows] = values


def max_rows(slots: int, num_drafts: int) -> int:
    """Return the most one-token rows of a step; with drafts there is a graph of more than skinny GEMMs take."""
    return max(slots * (1 + num_drafts), 2 * MAX_TOKENS) if num_drafts else slots


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "only running sequences are computed"
    return sequence.slot
