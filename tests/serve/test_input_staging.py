"""Staged inputs equal hand-built ones, whatever the buffers held before; padding belongs to no sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_inputs import step_inputs

from llmb.serve.input_staging import NUM_HOST_BUFFERS, InputStaging, StepBuffer, StepSizes
from llmb.serve.request import Request, Sequence
from llmb.serve.step_batch import ScheduledChunk, StepBatch, StepInputs

CPU = torch.device("cpu")
SLOTS, BLOCKS, LENGTH = 6, 5, 4  # tokens of a block


def sequence(slot: int, tokens: list[int], blocks: list[int], unread: int = 0) -> Sequence:
    request = Request(request_id=slot, prompt=tokens[:1], max_tokens=100)
    return Sequence(request=request, token_ids=tokens, num_pending_tokens=unread, slot=slot, block_ids=blocks)


def staged(staging: InputStaging, batch: StepBatch, sizes: StepSizes | None = None) -> tuple[StepBuffer, StepInputs]:
    """Stage a batch, without padding unless sizes are given."""
    longest = max((chunk.end for chunk in batch.chunks), default=0)
    unpadded = StepSizes(
        num_tokens=batch.num_tokens,
        num_decodes=batch.num_decodes,
        num_prefills=len(batch.chunks) - batch.num_decodes,
        num_samples=len(batch.sampling_chunks),
        num_blocks=max(1, -(-longest // LENGTH)),
    )
    buffer = StepBuffer.on(CPU, sizes or unpadded)
    buffer.int64s.fill_(-99)
    buffer.int32s.fill_(-99)
    staging.upload(batch, buffer)
    return buffer, buffer.inputs(batch, longest, batch.num_decodes)


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    """Draw chunks at any position of their sequences; the last token may be pending."""
    free = iter(draw(st.permutations(range(100))))
    chunks = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS)):
        length = draw(st.integers(1, BLOCKS * LENGTH))
        count = draw(st.sampled_from([1, draw(st.integers(1, length))]))
        samples, unread = draw(st.booleans()), draw(st.booleans())
        tokens = draw(st.lists(st.integers(0, 50), min_size=length, max_size=length))
        blocks = [next(free) for _ in range(-(-length // LENGTH))]
        host_tokens = tokens[:-1] if unread else tokens
        running = Sequence(
            request=Request(request_id=slot, prompt=[1], max_tokens=100),
            token_ids=host_tokens,
            slot=slot,
            block_ids=blocks,
        )
        chunks.append(ScheduledChunk(running, length - count, count, samples))
    return StepBatch(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1))


def assert_same(actual: StepInputs, expected: StepInputs) -> None:
    for name in ("positions_N", "slot_mapping_N", "slots_P", "cu_seqlens_P1", "seq_lens_P"):
        actual_value, expected_value = getattr(actual, name), getattr(expected, name)
        assert (actual_value.dtype, actual_value.tolist()) == (expected_value.dtype, expected_value.tolist()), name
    for name in ("num_decodes", "max_query_len", "max_seq_len", "prefill_chunks"):
        assert getattr(actual, name) == getattr(expected, name), name


@pytest.mark.slow
@given(st.lists(batches(), min_size=1, max_size=NUM_HOST_BUFFERS + 2))
def test_staged_inputs_equal_hand_built_inputs(batches: list[StepBatch]) -> None:
    staging = InputStaging(SLOTS, BLOCKS, LENGTH, SLOTS * BLOCKS * LENGTH, CPU)
    for batch in batches:
        buffer, inputs = staged(staging, batch)
        chunks = [
            (chunk.sequence.slot, chunk.sequence.block_ids, chunk.start, chunk.num_tokens) for chunk in batch.chunks
        ]
        assert_same(inputs, step_inputs(chunks, LENGTH))
        for row, chunk in zip(inputs.block_table_PM.tolist(), batch.chunks, strict=True):
            block_ids = chunk.sequence.block_ids
            assert row[: len(block_ids)] == block_ids
        ends = inputs.cu_seqlens_P1.tolist()[1:]
        sampling = [place for place, chunk in enumerate(batch.chunks) if chunk.samples]
        assert buffer.logits_indices_S.tolist() == [ends[place] - 1 for place in sampling]
        assert buffer.sample_slots_S.tolist() == [batch.chunks[place].sequence.slot for place in sampling]
        tokens = [
            chunk.sequence.token_ids[at] if at < len(chunk.sequence.token_ids) else -1 - chunk.sequence.slot
            for chunk in batch.chunks
            for at in range(chunk.start, chunk.end)
        ]
        assert buffer.tokens_N.tolist() == tokens


@pytest.mark.parametrize("real", [0, 1, 3])
def test_padding_uses_the_reserved_slot(real: int) -> None:
    staging = InputStaging(SLOTS, BLOCKS, LENGTH, 32, CPU)
    chunks = [ScheduledChunk(sequence(slot, [7] * 6, [slot, slot + 10]), 5, 1, True) for slot in range(real)]
    sizes = StepSizes(num_tokens=5, num_decodes=5, num_prefills=0, num_samples=5, num_blocks=BLOCKS)
    buffer, inputs = staged(staging, StepBatch(chunks), sizes)
    more = 5 - real
    assert buffer.tokens_N.tolist() == [7] * real + [0] * more
    assert inputs.positions_N.tolist() == [5] * real + [0] * more
    assert inputs.slot_mapping_N.tolist() == [(slot + 10) * LENGTH + 1 for slot in range(real)] + [-1] * more
    assert inputs.slots_P.tolist() == [*range(real), *[SLOTS] * more]
    assert inputs.cu_seqlens_P1.tolist() == [0, 1, 2, 3, 4, 5]
    assert inputs.seq_lens_P.tolist() == [6] * real + [0] * more
    assert buffer.logits_indices_S.tolist() == [*range(real), *[0] * more]
    assert buffer.sample_slots_S.tolist() == [*range(real), *[SLOTS] * more]


def test_padding_of_a_mixed_step_separates_decodes_from_prefill_chunks() -> None:
    staging = InputStaging(SLOTS, BLOCKS, LENGTH, 32, CPU, max_padding=2)
    chunks = [
        ScheduledChunk(sequence(1, [7] * 6, [1, 2]), 5, 1, True),
        ScheduledChunk(sequence(4, [8] * 3, [3]), 0, 3, False),
    ]
    sizes = StepSizes(num_tokens=7, num_decodes=3, num_prefills=3, num_samples=4, num_blocks=BLOCKS)
    buffer, inputs = staged(staging, StepBatch(chunks), sizes)
    assert buffer.tokens_N.tolist() == [7, 8, 8, 8, 0, 0, 0]
    assert inputs.slot_mapping_N.tolist() == [9, 12, 13, 14, -1, -1, -1]
    assert inputs.slots_P.tolist() == [1, SLOTS, SLOTS, 4, SLOTS, SLOTS]
    assert inputs.cu_seqlens_P1.tolist() == [0, 1, 2, 1, 4, 4, 4]
    assert inputs.seq_lens_P.tolist() == [6, 0, 0, 3, 0, 0]
    assert inputs.block_table_PM[3, 0].item() == 3
    assert buffer.logits_indices_S.tolist() == [0, 0, 0, 0]
    assert buffer.sample_slots_S.tolist() == [1, *[SLOTS] * 3]
    padded = buffer.inputs(StepBatch(), 20, num_decodes=3, max_query_len=7)
    assert (padded.padded_prefills, padded.max_query_len) == (3, 7)
    used = [(tokens, length) for tokens, length, _ in padded.sequences(LENGTH)]
    assert used == [(slice(0, 1), 6), (slice(1, 4), 3)]


def test_empty_batch_has_no_rows() -> None:
    buffer, inputs = staged(InputStaging(SLOTS, BLOCKS, LENGTH, 32, CPU), StepBatch())
    assert buffer.tokens_N.tolist() == buffer.logits_indices_S.tolist() == []
    assert inputs.cu_seqlens_P1.tolist() == [0]
    assert inputs.block_table_PM.shape == (0, 1)


def test_block_table_update_is_incremental_and_full_for_a_new_sequence() -> None:
    staging = InputStaging(SLOTS, BLOCKS, LENGTH, 32, CPU)
    first = sequence(2, [1] * 8, [5, 6])
    staged(staging, StepBatch([ScheduledChunk(first, 7, 1, True)]))
    assert first.num_synced_blocks == 2
    first.token_ids, first.block_ids = [1] * 9, [5, 6, 9]
    _, inputs = staged(staging, StepBatch([ScheduledChunk(first, 8, 1, True)]))
    assert inputs.block_table_PM.tolist() == [[5, 6, 9]]
    after = sequence(2, [3] * 5, [8, 4])
    _, inputs = staged(staging, StepBatch([ScheduledChunk(after, 0, 5, True)]))
    assert inputs.block_table_PM.tolist() == [[8, 4]]
    assert inputs.slot_mapping_N.tolist() == [32, 33, 34, 35, 16]


def test_windowed_layers_have_a_table_and_a_slot_mapping_of_their_own() -> None:
    staging = InputStaging(SLOTS, BLOCKS, LENGTH, 32, CPU, num_tables=2)
    decoding, chunked = sequence(1, [7] * 6, [1, 2]), sequence(4, [8] * 3, [3])
    decoding.window_block_ids, chunked.window_block_ids = [8, 9], [6]
    chunks = [ScheduledChunk(decoding, 5, 1, True), ScheduledChunk(chunked, 0, 3, False)]
    sizes = StepSizes(num_tokens=5, num_decodes=1, num_prefills=1, num_samples=2, num_blocks=2, num_tables=2)
    buffer, inputs = staged(staging, StepBatch(chunks), sizes)
    assert inputs.slot_mapping_N.tolist() == [9, 12, 13, 14, -1]
    assert inputs.block_table_PM.tolist() == [[1, 2], [3, 0]]
    assert inputs.window_slot_mapping_N is not None
    assert inputs.window_slot_mapping_N.tolist() == [37, 24, 25, 26, -1]
    assert inputs.window_metadata is not None
    assert inputs.window_metadata.block_table_PM.tolist() == [[8, 9], [6, 0]]
    assert inputs.window_metadata.seq_lens_P is inputs.seq_lens_P
    assert buffer.sample_slots_S.tolist() == [1, SLOTS]
