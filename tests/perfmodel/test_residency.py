"""Programs are right whatever the order in which three lanes get to them, as long as each waits for what it names.

A program is gone through with the contents of every buffer and place at home. Two entries that touch the same memory,
one of them writing, must be ordered by the lanes' own order and the declared waits: then no interleaving can differ.
"""

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outofcore_plans import models, plans

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.perfmodel.offload.buffers import Piece, Units
from llmb.perfmodel.offload.program import Copy, Operation, Program
from llmb.perfmodel.offload.residency import Residency
from llmb.perfmodel.offload.step_tasks import Beginning, beginning, step_work, waiting_updates

COMPUTE, INBOUND, OUTBOUND = range(3)
STEPS = 4
Place = tuple[str, str, int]  # device or home, kind, number


class Replay:
    """What is where, and who has read or written it since."""

    def __init__(self, model: Model, residency: Residency):
        self.version: dict[Piece, int] = {}
        self.content: dict[Place, tuple[Piece, int]] = {}
        self.writer: dict[Place, tuple[int, int]] = {}  # lane and entry
        self.readers: dict[Place, list[tuple[int, int]]] = defaultdict(list)
        self.known: list[list[tuple[int, int, int]]] = [[], [], []]  # per entry: how many of each lane are done before
        self.base = [0, 0, 0]
        for unit in range(Units(model).count):
            piece = Piece("param", unit)
            self.version[piece] = 0
            place = ("device", residency.where) if piece in residency.resident else ("home", residency.homes)
            self.content[place[0], "param", place[1][piece]] = piece, 0

    def run(self, program: Program) -> None:
        self.base = [len(entries) for entries in self.known]
        for copy in program.first_sends:
            self.send(copy)
        for operation in program.operations:
            for copy in operation.brings:
                self.bring(copy)
            self.compute(operation)
            for copy in operation.sends:
                self.send(copy)

    def enter(self, lane: int, waits: dict[int, int]) -> None:
        """One more entry of a lane, which knows what the one before it knew, and all it waits for."""
        seen = list(self.known[lane][-1]) if self.known[lane] else [0, 0, 0]
        for other, entry in waits.items():
            at = self.base[other] + entry
            assert at < len(self.known[other]), "waits for something that is not issued yet"
            if at >= 0:
                seen = [max(pair) for pair in zip(seen, self.known[other][at], strict=True)]
        seen[lane] = len(self.known[lane]) + 1
        self.known[lane].append(tuple(seen))

    def ordered(self, lane: int, earlier: tuple[int, int]) -> bool:
        other, entry = earlier
        return self.known[lane][-1][other] > entry

    def read(self, lane: int, place: Place, piece: Piece) -> None:
        assert self.content.get(place) == (piece, self.version[piece])
        assert place not in self.writer or self.ordered(lane, self.writer[place]), f"{piece} is read before it is there"
        self.readers[place].append((lane, len(self.known[lane]) - 1))

    def write(self, lane: int, place: Place, piece: Piece) -> None:
        before = [*self.readers.pop(place, ()), *([self.writer[place]] if place in self.writer else [])]
        assert all(self.ordered(lane, one) for one in before), f"{piece} is written over something still in use"
        self.writer[place] = lane, len(self.known[lane]) - 1
        self.content[place] = piece, self.version[piece]

    def bring(self, copy: Copy) -> None:
        self.enter(INBOUND, {COMPUTE: copy.wait_compute, OUTBOUND: copy.wait_other})
        self.read(INBOUND, ("home", copy.piece.kind, copy.home), copy.piece)
        self.write(INBOUND, ("device", copy.piece.kind, copy.buffer), copy.piece)

    def send(self, copy: Copy) -> None:
        self.enter(OUTBOUND, {COMPUTE: copy.wait_compute, INBOUND: copy.wait_other})
        self.read(OUTBOUND, ("device", copy.piece.kind, copy.buffer), copy.piece)
        self.write(OUTBOUND, ("home", copy.piece.kind, copy.home), copy.piece)

    def compute(self, operation: Operation) -> None:
        self.enter(COMPUTE, {INBOUND: operation.wait_inbound, OUTBOUND: operation.wait_outbound})
        work = operation.work
        for piece in (*work.reads, *work.changes):
            self.read(COMPUTE, ("device", piece.kind, operation.buffers[piece]), piece)
        for piece in (*work.changes, *work.makes):
            self.version[piece] = self.version.get(piece, 0) + 1
            self.write(COMPUTE, ("device", piece.kind, operation.buffers[piece]), piece)
        for piece in work.ends:
            del self.version[piece]


def steps_of(model: Model, plan: Plan) -> list[list]:
    """Some steps, the third without what waited before it, as behind a checkpoint; and what is left at the end."""
    found = [beginning(plan, step) for step in range(STEPS)]
    works = [step_work(model, plan, one) for one in found[:2]]
    works.append(waiting_updates(model, plan, beginning(plan, 2)))
    works.append(step_work(model, plan, Beginning(2, waiting=False)))
    works += [step_work(model, plan, one) for one in found[3:]]
    return [*works, waiting_updates(model, plan, beginning(plan, STEPS))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_computation_finds_what_it_names_in_any_interleaving(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model))
    residency = Residency(model, plan)
    replay = Replay(model, residency)
    works = steps_of(model, plan)
    for work, ahead in zip(works, [*works[1:], []], strict=True):
        if work:
            replay.run(residency.program(work, ahead))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_restored_snapshot_gives_the_same_program(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model))
    first, second = Residency(model, plan), Residency(model, plan)
    works = [step_work(model, plan, beginning(plan, step)) for step in range(3)]
    first.program(works[0], works[1])
    second.restore(first.snapshot())
    assert second.snapshot() == first.snapshot()
    assert second.program(works[1], works[2]) == first.program(works[1], works[2])
    assert second.snapshot() == first.snapshot()


def test_a_missing_wait_is_found() -> None:
    """The replay itself: without its waits a program that copies anything is refused."""
    model = Model(
        name="small", architecture="llama", layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=100
    )
    plan = Plan(
        dtype="fp32", seqlen=8, gbs=1, chunk_tokens=4, seqs_per_group=1, groups_per_round=1, loss_tokens=4,
        update="master", update_at="backward", resident_params=0, resident_grads=0, resident_states=0, param_blocks=1,
        grad_blocks=1, state_blocks=1, inp_slots=2, kv_slots=1, attn_slots=1, rest_slots=1, levels="F" * 6,
    )  # fmt: skip
    residency = Residency(model, plan)
    program = residency.program(step_work(model, plan, beginning(plan, 0)))
    never = -(1 << 60)
    carefree = [operation._replace(wait_inbound=never) for operation in program.operations]
    with pytest.raises(AssertionError, match="before it is there"):
        Replay(model, Residency(model, plan)).run(Program(program.first_sends, tuple(carefree), program.homes))
