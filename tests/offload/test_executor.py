"""The executor and its lanes: all is issued once, and the declared waits are what keeps it right."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from weakref import ref

import pytest
from ordinary_training import CPU, LEAST, TIED, UNTIED, trained, trainer_of
from shuffled_lanes import ShuffledLanes

from llmb.offload.bucket_params import places
from llmb.offload.cuda_streams import LanesInTurn, lanes_on
from llmb.offload.executor import Executor
from llmb.offload.step_programs import Part, Programs
from llmb.perfmodel.offload.buffers import Units
from llmb.perfmodel.offload.program import BEFORE_ALL, Program
from llmb.perfmodel.offload.step_tasks import beginning, step_work
from llmb.perfmodel.offload.stream_timeline import LANES


def test_a_watch_sees_every_entry_of_every_lane() -> None:
    trainer = trainer_of(UNTIED, LEAST)
    program = trainer.programs.residency.program(step_work(UNTIED, LEAST, beginning(LEAST, 0)))
    seen: Counter[str] = Counter()
    computed = []

    def watch(lane, work, copy, start, end) -> None:
        seen[lane] += 1
        assert (copy is None) == (lane == "compute")
        assert start.seconds_until(end) >= 0

    Executor(trainer.arena, LanesInTurn()).follow(program, computed.append, watch)
    assert tuple(computed) == program.operations
    assert seen == {"compute": len(program.operations), "inbound": program.brought, "outbound": program.sent}


@pytest.mark.parametrize("lane", ["inbound", "outbound", "compute"])
def test_without_its_waits_a_program_goes_wrong(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    """What makes the proof one: the odd orders do find a wait that is missing."""
    right = trained(trainer_of(UNTIED, LEAST), 2)
    original = Executor.follow

    def carefree(self: Executor, program: Program, *rest, **options) -> None:
        original(self, without_waits(program, lane), *rest, **options)

    monkeypatch.setattr(Executor, "follow", carefree)
    found = [trained(trainer_of(UNTIED, LEAST, lanes=ShuffledLanes(seed)), 2) for seed in range(4)]
    assert any(one != right for one in found)


def without_waits(program: Program, lane: str) -> Program:
    """The same, but nobody waits for this lane."""
    changed = []
    for operation in program.operations:
        brings = operation.brings
        if lane == "compute":
            brings = tuple(copy._replace(wait_compute=BEFORE_ALL) for copy in brings)
        elif lane == "outbound":
            brings = tuple(copy._replace(wait_other=BEFORE_ALL) for copy in brings)
            operation = operation._replace(wait_outbound=BEFORE_ALL)
        else:
            operation = operation._replace(wait_inbound=BEFORE_ALL)
        changed.append(operation._replace(brings=brings))
    return Program(program.first_sends, tuple(changed), program.homes)


def test_lanes_on_a_cpu_do_everything_at_once() -> None:
    lanes, done = lanes_on(CPU), []
    lanes.begin()
    for lane in LANES:
        lanes.enter(lane, lambda lane=lane: done.append(lane), {})
    moment = lanes.moment("compute")
    assert done == list(LANES)
    assert moment.is_past()


def test_every_number_of_a_unit_has_one_name() -> None:
    for model in (UNTIED, TIED):
        named = Counter()
        for unit in range(Units(model).count):
            shapes = Units(model).tensors(unit)
            for place in places(model, unit):
                named[place.tensor, unit] += len(range(shapes[place.tensor][0])[place.rows])
            assert all(named[number, unit] == shape[0] for number, shape in enumerate(shapes))


@pytest.mark.parametrize("update_at", ["forward", "backward"])
def test_after_a_few_steps_no_more_programs_are_compiled(update_at: str) -> None:
    plan = replace(LEAST, update_at=update_at, gbs=5, inp_slots=4, rest_slots=3, chunk_tokens=4, levels="FAI" * 3)
    programs = Programs(UNTIED, plan)
    found = [Part(beginning(plan, step)) for step in range(13)]
    issued = [programs.next(part, then) for part, then in pairwise(found)]
    assert len({id(program) for program in issued}) <= 6
    assert issued[-1] in issued[:-1]


def test_a_trainer_gives_its_memory_back_at_once() -> None:
    """Several runs follow one another in a process: the next finds the device empty."""
    trainer = trainer_of(UNTIED, LEAST)
    trained(trainer, 2)
    arena = ref(trainer.arena)
    del trainer
    assert arena() is None
