"""Programs are right whatever the order in which three streams get to them, as long as each waits for what it names.

A program is gone through with the contents of every buffer and host slot. Two entries that touch the same memory,
one of them writing, must be ordered by the streams' own order and the declared waits: then no interleaving can differ.
"""

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outofcore_plans import models, plans
from small_models import llama_model

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.perfmodel.offload.buffers import BufferKey, ParamBuckets
from llmb.perfmodel.offload.program import Copy, Operation, Program
from llmb.perfmodel.offload.residency import Residency
from llmb.perfmodel.offload.step_tasks import StepStart, pending_updates, step_start, step_tasks

COMPUTE, INBOUND, OUTBOUND = range(3)
STEPS = 4
Slot = tuple[str, str, int]  # device or host, kind, index


class Replay:
    """Contents of buffers and host slots, and who has read or written them since."""

    def __init__(self, model: Model, residency: Residency):
        self.version: dict[BufferKey, int] = {}
        self.content: dict[Slot, tuple[BufferKey, int]] = {}
        self.writer: dict[Slot, tuple[int, int]] = {}  # stream and entry
        self.readers: dict[Slot, list[tuple[int, int]]] = defaultdict(list)
        # Of each stream and its entries: operations of each stream done before.
        self.progress: list[list[tuple[int, int, int]]] = [[] for _ in range(3)]
        self.base = [0, 0, 0]
        for bucket in range(ParamBuckets(model).count):
            key = BufferKey("param", bucket)
            self.version[key] = 0
            place = ("device", residency.where) if key in residency.resident else ("host", residency.host_slots)
            self.content[place[0], "param", place[1][key]] = key, 0

    def run(self, program: Program) -> None:
        self.base = [len(entries) for entries in self.progress]
        for copy in program.first_copies_out:
            self.send(copy)
        for operation in program.operations:
            for copy in operation.copies_in:
                self.bring(copy)
            self.compute(operation)
            for copy in operation.copies_out:
                self.send(copy)

    def enter(self, stream: int, waits: dict[int, int]) -> None:
        """One more entry of a stream, which knows what the one before it knew, and all it waits for."""
        seen = list(self.progress[stream][-1]) if self.progress[stream] else [0, 0, 0]
        for alternative, entry in waits.items():
            at = self.base[alternative] + entry
            assert at < len(self.progress[alternative]), "waits for something that is not issued yet"
            if at >= 0:
                seen = [max(pair) for pair in zip(seen, self.progress[alternative][at], strict=True)]
        seen[stream] = len(self.progress[stream]) + 1
        self.progress[stream].append(tuple(seen))

    def ordered(self, stream: int, earlier: tuple[int, int]) -> bool:
        alternative, entry = earlier
        return self.progress[stream][-1][alternative] > entry

    def read(self, stream: int, place: Slot, key: BufferKey) -> None:
        assert self.content.get(place) == (key, self.version[key])
        assert place not in self.writer or self.ordered(stream, self.writer[place]), f"{key} is read before it is there"
        self.readers[place].append((stream, len(self.progress[stream]) - 1))

    def write(self, stream: int, place: Slot, key: BufferKey) -> None:
        before = [*self.readers.pop(place, ()), *([self.writer[place]] if place in self.writer else [])]
        assert all(self.ordered(stream, item) for item in before), f"{key} is written over something still in use"
        self.writer[place] = stream, len(self.progress[stream]) - 1
        self.content[place] = key, self.version[key]

    def bring(self, copy: Copy) -> None:
        self.enter(INBOUND, {COMPUTE: copy.wait_compute, OUTBOUND: copy.wait_other})
        self.read(INBOUND, ("host", copy.key.kind, copy.host_slot), copy.key)
        self.write(INBOUND, ("device", copy.key.kind, copy.buffer), copy.key)

    def send(self, copy: Copy) -> None:
        self.enter(OUTBOUND, {COMPUTE: copy.wait_compute, INBOUND: copy.wait_other})
        self.read(OUTBOUND, ("device", copy.key.kind, copy.buffer), copy.key)
        self.write(OUTBOUND, ("host", copy.key.kind, copy.host_slot), copy.key)

    def compute(self, operation: Operation) -> None:
        self.enter(COMPUTE, {INBOUND: operation.wait_inbound, OUTBOUND: operation.wait_outbound})
        task = operation.task
        for key in (*task.reads, *task.changes):
            self.read(COMPUTE, ("device", key.kind, operation.buffers[key]), key)
        for key in (*task.changes, *task.makes):
            self.version[key] = self.version.get(key, 0) + 1
            self.write(COMPUTE, ("device", key.kind, operation.buffers[key]), key)
        for key in task.ends:
            del self.version[key]


def steps_of(model: Model, plan: Plan) -> list[list]:
    """Some steps, the third without what waited before it, as behind a checkpoint; and what is left at the end."""
    actual = [step_start(plan, step) for step in range(STEPS)]
    tasks = [step_tasks(model, plan, item) for item in actual[:2]]
    tasks.append(pending_updates(model, plan, step_start(plan, 2)))
    tasks.append(step_tasks(model, plan, StepStart(2, pending=False)))
    tasks += [step_tasks(model, plan, item) for item in actual[3:]]
    return [*tasks, pending_updates(model, plan, step_start(plan, STEPS))]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_task_has_its_buffers_in_any_interleaving(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model))
    residency = Residency(model, plan)
    replay = Replay(model, residency)
    tasks = steps_of(model, plan)
    for task, ahead in zip(tasks, [*tasks[1:], []], strict=True):
        if task:
            replay.run(residency.program(task, ahead))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_restored_snapshot_gives_the_same_program(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model))
    first, second = Residency(model, plan), Residency(model, plan)
    tasks = [step_tasks(model, plan, step_start(plan, step)) for step in range(3)]
    first.program(tasks[0], tasks[1])
    second.restore(first.snapshot())
    assert second.snapshot() == first.snapshot()
    assert second.program(tasks[1], tasks[2]) == first.program(tasks[1], tasks[2])
    assert second.snapshot() == first.snapshot()


def test_missing_wait_is_detected() -> None:
    """The replay itself: without its waits a program that copies anything is refused."""
    model = llama_model(layers=3, vocab=100)
    plan = Plan(
        dtype="fp32", seqlen=8, gbs=1, chunk_tokens=4, seqs_per_group=1, groups_per_round=1, loss_tokens=4,
        update="master", update_at="backward", resident_params=0, resident_grads=0, resident_states=0, param_blocks=1,
        grad_blocks=1, state_blocks=1, inp_slots=2, kv_slots=1, attn_slots=1, rest_slots=1, levels="F" * 6,
    )  # fmt: skip
    residency = Residency(model, plan)
    program = residency.program(step_tasks(model, plan, step_start(plan, 0)))
    never = -(1 << 60)
    carefree = [operation._replace(wait_inbound=never) for operation in program.operations]
    with pytest.raises(AssertionError, match="before it is there"):
        Replay(model, Residency(model, plan)).run(
            Program(program.first_copies_out, tuple(carefree), program.host_slots)
        )
