"""A plan as tensors: equal to those built by hand from the same parts, whatever the buffers held before; padding is
tokens of no sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import step_inputs

from llmb.serve.input_staging import TURNS, Sizes, Staging, StepBuffer
from llmb.serve.request import Request, Sequence
from llmb.serve.step_batch import Inputs, Part, Plan

CPU = torch.device("cpu")
SLOTS, BLOCKS, LENGTH = 6, 5, 4  # tokens of a block


def sequence(slot: int, tokens: list[int], blocks: list[int], unread: int = 0) -> Sequence:
    request = Request(number=slot, prompt=tokens[:1], max_tokens=100)
    return Sequence(request=request, tokens=tokens, pending=unread, slot=slot, blocks=blocks)


def staged(staging: Staging, plan: Plan, sizes: Sizes | None = None) -> tuple[StepBuffer, Inputs]:
    """In the plan's own sizes, if no others are given."""
    longest = max((part.end for part in plan.parts), default=0)
    own = Sizes(
        tokens=plan.tokens, parts=len(plan.parts), samples=len(plan.sampling), blocks=max(1, -(-longest // LENGTH))
    )
    buffer = StepBuffer.on(CPU, sizes or own)
    buffer.longs.fill_(-99)
    buffer.ints.fill_(-99)
    staging.load(plan, buffer)
    return buffer, buffer.inputs(plan, longest, plan.decodes)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Parts of sequences that are anywhere in their tokens; the newest may be unread."""
    free = iter(draw(st.permutations(range(100))))
    parts = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS)):
        length = draw(st.integers(1, BLOCKS * LENGTH))
        count = draw(st.sampled_from([1, draw(st.integers(1, length))]))
        samples, unread = draw(st.booleans()), draw(st.booleans())
        tokens = draw(st.lists(st.integers(0, 50), min_size=length, max_size=length))
        blocks = [next(free) for _ in range(-(-length // LENGTH))]
        known = tokens[:-1] if unread else tokens
        one = Sequence(request=Request(number=slot, prompt=[1], max_tokens=100), tokens=known, slot=slot, blocks=blocks)
        parts.append(Part(one, length - count, count, samples))
    return Plan(sorted(parts, key=lambda part: part.count > 1))


def assert_same(made: Inputs, wanted: Inputs) -> None:
    for name in ("positions_N", "places_N", "slots_P", "starts_P1", "lengths_P"):
        ours, theirs = getattr(made, name), getattr(wanted, name)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist()), name
    for name in ("decodes", "longest_part", "longest", "parts"):
        assert getattr(made, name) == getattr(wanted, name), name


@given(st.lists(plans(), min_size=1, max_size=TURNS + 2))
def test_steps_one_after_the_other(several: list[Plan]) -> None:
    staging = Staging(SLOTS, BLOCKS, LENGTH, SLOTS * BLOCKS * LENGTH, CPU)
    for plan in several:
        buffer, inputs = staged(staging, plan)
        parts = [(part.sequence.slot, part.sequence.blocks, part.start, part.count) for part in plan.parts]
        assert_same(inputs, step_inputs(parts, LENGTH))
        for row, part in zip(inputs.table_PM.tolist(), plan.parts, strict=True):
            held = part.sequence.blocks
            assert row[: len(held)] == held
        ends = inputs.starts_P1.tolist()[1:]
        sampling = [place for place, part in enumerate(plan.parts) if part.samples]
        assert buffer.rows_S.tolist() == [ends[place] - 1 for place in sampling]
        assert buffer.targets_S.tolist() == [plan.parts[place].sequence.slot for place in sampling]
        tokens = [
            part.sequence.tokens[at] if at < len(part.sequence.tokens) else -1 - part.sequence.slot
            for part in plan.parts
            for at in range(part.start, part.end)
        ]
        assert buffer.tokens_N.tolist() == tokens


@pytest.mark.parametrize("real", [0, 1, 3])
def test_padding_belongs_to_nobody(real: int) -> None:
    staging = Staging(SLOTS, BLOCKS, LENGTH, 32, CPU)
    parts = [Part(sequence(slot, [7] * 6, [slot, slot + 10]), 5, 1, True) for slot in range(real)]
    sizes = Sizes(tokens=5, parts=5, samples=5, blocks=BLOCKS)
    buffer, inputs = staged(staging, Plan(parts), sizes)
    more = 5 - real
    assert buffer.tokens_N.tolist() == [7] * real + [0] * more
    assert inputs.positions_N.tolist() == [5] * real + [0] * more
    assert inputs.places_N.tolist() == [(slot + 10) * LENGTH + 1 for slot in range(real)] + [-1] * more
    assert inputs.slots_P.tolist() == [*range(real), *[SLOTS] * more]
    assert inputs.starts_P1.tolist() == [0, 1, 2, 3, 4, 5]
    assert inputs.lengths_P.tolist() == [6] * real + [0] * more
    assert buffer.rows_S.tolist() == [*range(real), *[0] * more]
    assert buffer.targets_S.tolist() == [*range(real), *[SLOTS] * more]


def test_an_empty_plan_has_no_rows() -> None:
    buffer, inputs = staged(Staging(SLOTS, BLOCKS, LENGTH, 32, CPU), Plan())
    assert buffer.tokens_N.tolist() == buffer.rows_S.tolist() == []
    assert inputs.starts_P1.tolist() == [0]
    assert inputs.table_PM.shape == (0, 1)


def test_only_new_blocks_are_noted_and_all_of_them_when_the_slot_changes_hands() -> None:
    staging = Staging(SLOTS, BLOCKS, LENGTH, 32, CPU)
    first = sequence(2, [1] * 8, [5, 6])
    staged(staging, Plan([Part(first, 7, 1, True)]))
    assert first.synced == 2
    first.tokens, first.blocks = [1] * 9, [5, 6, 9]
    _, inputs = staged(staging, Plan([Part(first, 8, 1, True)]))
    assert inputs.table_PM.tolist() == [[5, 6, 9]]
    after = sequence(2, [3] * 5, [8, 4])
    _, inputs = staged(staging, Plan([Part(after, 0, 5, True)]))
    assert inputs.table_PM.tolist() == [[8, 4]]
    assert inputs.places_N.tolist() == [32, 33, 34, 35, 16]
