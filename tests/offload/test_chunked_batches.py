"""Batches of a plan: the tokens of ordinary training, and packed documents that do not see one another."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_training import CPU, LEAST
from small_models import llama_model

from llmb.config.model import RopeConfig
from llmb.config.offload_plan import Plan
from llmb.errors import ConfigError
from llmb.formats.token_file import TokenWriter
from llmb.models.blocks import rope_table, sequential_positions
from llmb.offload.chunked_batches import IGNORED, ChunkedBatches, GroupBatch
from llmb.ops.attention.segment_attention import chunk_rows
from llmb.perfmodel.offload.step_tasks import round_chunks
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.runtime.token_data import TokenFile

MODEL = llama_model(name="small", vocab=96, rope=RopeConfig(scaling="llama3", factor=8.0, original_tokens=64))
END = 7


def plan_of(seqlen: int, gbs: int, chunk: int, seqs_per_group: int = 1, groups_per_round: int = 2) -> Plan:
    return replace(
        LEAST, seqlen=seqlen, gbs=gbs, chunk_tokens=chunk, seqs_per_group=seqs_per_group,
        groups_per_round=groups_per_round, levels="",
    )  # fmt: skip


def token_file(path: Path, tokens: list[int], end: int | None = END) -> TokenFile:
    with TokenWriter(path, MODEL.vocab, end) as file:
        file.add(tokens)
    return TokenFile(path)


def whole(groups: list[GroupBatch], name: str) -> torch.Tensor:
    return torch.cat([getattr(group, name) for group in groups])


def visible(groups: list[GroupBatch], plan: Plan) -> torch.Tensor:
    """Which token of the step sees which, as the spans say."""
    sees = torch.zeros(plan.step_tokens, plan.step_tokens, dtype=torch.bool)
    for number, group in enumerate(groups):
        first = number * plan.group_tokens
        for segments in group.segments:
            for span in segments:
                rows = first + span.causal_start + torch.arange(span.end - span.start)
                sees[rows, first + span.context_start : first + span.causal_start] = True
                local = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
                sees[rows[:, None], rows[None]] = local
    return sees


@pytest.mark.parametrize("from_file", [False, True])
def test_unpacked_batch_is_that_of_ordinary_training(tmp_path: Path, from_file: bool) -> None:
    plan = plan_of(seqlen=24, gbs=5, chunk=48, seqs_per_group=2)
    data = token_file(tmp_path / "tokens", [(5 * i) % 96 for i in range(300)]) if from_file else None
    for step in (1, 4):
        groups = ChunkedBatches(MODEL, plan, 11, data, False, CPU).step(step)
        first, shape = (step - 1) * 5, (5, 25)
        expected = data.sequences(first, shape, CPU) if data else synthetic_tokens(11, first, shape, 96, CPU)
        assert [len(group.tokens_T) for group in groups] == [48, 48, 24]
        assert torch.equal(whole(groups, "tokens_T"), expected[:, :-1].flatten())
        assert torch.equal(whole(groups, "labels_T"), expected[:, 1:].flatten())
        assert torch.equal(whole(groups, "positions_T"), torch.arange(24).repeat(5))
        assert {group.num_labels for group in groups} == {5 * 24}
        assert [group.segments for group in groups] == [
            (((0, 24, 0, 0), (24, 48, 24, 24)),), (((0, 24, 0, 0), (24, 48, 24, 24)),), (((0, 24, 0, 0),),)
        ]  # fmt: skip
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int64 for group in groups for tensor in group[:3])


def test_packed_documents_by_hand(tmp_path: Path) -> None:
    text = [1, 2, 3, END, 4, END, END, 5, 6, 8, 9, 10, 11]  # its last text is not closed
    plan = plan_of(seqlen=8, gbs=2, chunk=5)
    data = token_file(tmp_path / "tokens", text)
    item, two = ChunkedBatches(MODEL, plan, 1, data, True, CPU).step(1)
    assert item.tokens_T.tolist() == text[:8]
    assert item.labels_T.tolist() == [2, 3, END, IGNORED, END, IGNORED, IGNORED, 6]
    assert item.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    assert item.segments == (((0, 4, 0, 0), (4, 5, 4, 4)), ((0, 1, 4, 5), (1, 2, 6, 6), (2, 3, 7, 7)))
    assert two.tokens_T.tolist() == [6, 8, 9, 10, 11, 1, 2, 3]  # cut by the border, then the file begins again
    assert two.labels_T.tolist() == [8, 9, 10, 11, IGNORED, 2, 3, END]
    assert two.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert item.num_labels == two.num_labels == 12


@settings(max_examples=40, deadline=None)
@given(draw=st.data())
def test_packed_documents_attend_to_themselves_only(tmp_path_factory, draw) -> None:
    seqs_per_group = draw.draw(st.integers(1, 3))
    seqlen = draw.draw(st.integers(2, 20))
    chunk = draw.draw(st.integers(1, seqlen)) if seqs_per_group == 1 else seqlen * seqs_per_group
    plan = plan_of(seqlen, draw.draw(st.integers(1, 5)), chunk, seqs_per_group, draw.draw(st.integers(1, 3)))
    text = draw.draw(st.lists(st.sampled_from([END, 1, 2, 3]), min_size=seqlen + 1, max_size=60))
    data = token_file(tmp_path_factory.mktemp("text") / "tokens", text)
    step = draw.draw(st.integers(1, 4))

    documents, labels, positions = [], [], []  # token by token, from the file
    document = place = 0
    for sequence in range((step - 1) * plan.gbs, step * plan.gbs):
        document, place = document + 1, 0
        for at in range(sequence * seqlen, (sequence + 1) * seqlen):
            closes = text[at % len(text)] == END or at % len(text) == len(text) - 1
            documents.append(document)
            positions.append(place)
            labels.append(IGNORED if closes else text[(at + 1) % len(text)])
            document, place = (document + 1, 0) if closes else (document, place + 1)
    assume(set(labels) != {IGNORED})
    groups = ChunkedBatches(MODEL, plan, 1, data, True, CPU).step(step)
    assert whole(groups, "labels_T").tolist() == labels
    assert whole(groups, "positions_T").tolist() == positions
    assert groups[0].num_labels == sum(label != IGNORED for label in labels)
    same = torch.tensor(documents)[:, None] == torch.tensor(documents)[None]
    assert torch.equal(visible(groups, plan), same.tril())
    for round_ in range(plan.rounds):
        for chunk in round_chunks(plan, round_):
            segments = groups[chunk.group].segments[chunk.number]
            assert chunk_rows(segments) == slice(chunk.first, chunk.first + chunk.tokens)
            assert all(before.end == after.start for before, after in pairwise(segments))


def test_a_step_does_not_depend_on_the_plan(tmp_path: Path) -> None:
    data = token_file(tmp_path / "tokens", [(i * i) % 20 for i in range(500)])
    plans = [plan_of(24, 6, 24), plan_of(24, 6, 7, groups_per_round=1), plan_of(24, 6, 96, seqs_per_group=4)]
    steps = [ChunkedBatches(MODEL, plan, 1, data, True, CPU).step(3) for plan in plans]
    for name in ("tokens_T", "labels_T", "positions_T"):
        assert all(torch.equal(whole(step, name), whole(steps[0], name)) for step in steps)
    seen = [visible(step, plan) for step, plan in zip(steps, plans, strict=True)]
    assert all(torch.equal(item, seen[0]) for item in seen)


@pytest.mark.parametrize("pack", [False, True])
def test_rope_rows_follow_positions(pack: bool, tmp_path: Path) -> None:
    data = token_file(tmp_path / "tokens", [(i * i) % 20 for i in range(500)]) if pack else None
    batches = ChunkedBatches(MODEL, plan_of(24, 6, 48, seqs_per_group=2), 1, data, pack, CPU)
    table = rope_table(MODEL.rope, 8, sequential_positions(24, CPU))
    for group in batches.step(2):
        for rows in (slice(0, 48), slice(20, 31)):
            for actual, whole_table in zip(batches.rope_rows(group, rows), table, strict=True):
                assert actual.dtype == torch.float32
                assert torch.equal(actual, whole_table[group.positions_T[rows]])


def test_data_that_cannot_be_packed_is_refused_in_one_line(tmp_path: Path) -> None:
    plan = plan_of(8, 1, 8)
    with pytest.raises(ConfigError, match="needs a token file with an end-of-text token; no token file is given"):
        ChunkedBatches(MODEL, plan, 1, None, True, CPU)
    with pytest.raises(ConfigError, match=r"end-of-text token; .*unmarked has none"):
        ChunkedBatches(MODEL, plan, 1, token_file(tmp_path / "unmarked", [1] * 20, end=None), True, CPU)
    with pytest.raises(ConfigError, match="ends: a whole step of texts of one token"):
        ChunkedBatches(MODEL, plan, 1, token_file(tmp_path / "ends", [END] * 20), True, CPU).step(1)
