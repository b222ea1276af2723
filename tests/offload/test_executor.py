"""Executor and streams: every entry is issued once, and the declared waits make the result right."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from weakref import ref

import pytest
from reference_training import CPU, LEAST, UNTIED, trained, trainer_of
from shuffled_streams import ShuffledStreams

from llmb.offload.cuda_streams import SerialStreams, create_streams
from llmb.offload.executor import Executor
from llmb.offload.step_programs import ProgramCache, StepRequest
from llmb.perfmodel.offload.program import BEFORE_ALL, Program
from llmb.perfmodel.offload.step_tasks import step_start, step_tasks
from llmb.perfmodel.offload.stream_timeline import STREAMS


def test_observer_is_called_for_every_entry_of_every_stream() -> None:
    trainer = trainer_of(UNTIED, LEAST)
    program = trainer.programs.residency.program(step_tasks(UNTIED, LEAST, step_start(LEAST, 0)))
    entries: Counter[str] = Counter()
    computed = []

    def observe(stream, task, copy, start, end) -> None:
        entries[stream] += 1
        assert (copy is None) == (stream == "compute")
        assert start.elapsed_s(end) >= 0

    Executor(trainer.arena, SerialStreams()).run(program, computed.append, observe)
    assert tuple(computed) == program.operations
    copies = {"inbound": program.num_copies_in, "outbound": program.num_copies_out}
    assert entries == {"compute": len(program.operations), **copies}


@pytest.mark.parametrize("stream", ["inbound", "outbound", "compute"])
def test_missing_waits_give_wrong_results(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    """The shuffled orders do detect a missing wait."""
    expected = trained(trainer_of(UNTIED, LEAST), 2)
    original = Executor.run

    def run_without_waits(self: Executor, program: Program, *args, **options) -> None:
        original(self, without_waits(program, stream), *args, **options)

    monkeypatch.setattr(Executor, "run", run_without_waits)
    results = [trained(trainer_of(UNTIED, LEAST, streams=ShuffledStreams(seed)), 2) for seed in range(4)]
    assert any(result != expected for result in results)


def without_waits(program: Program, stream: str) -> Program:
    """Return the program with no waits for this stream."""
    operations = []
    for operation in program.operations:
        copies_in = operation.copies_in
        if stream == "compute":
            copies_in = tuple(copy._replace(wait_compute=BEFORE_ALL) for copy in copies_in)
        elif stream == "outbound":
            copies_in = tuple(copy._replace(wait_other=BEFORE_ALL) for copy in copies_in)
            operation = operation._replace(wait_outbound=BEFORE_ALL)
        else:
            operation = operation._replace(wait_inbound=BEFORE_ALL)
        operations.append(operation._replace(copies_in=copies_in))
    return Program(program.first_copies_out, tuple(operations), program.host_slots)


def test_cpu_streams_execute_at_once() -> None:
    streams, done = create_streams(CPU), []
    streams.begin()
    for stream in STREAMS:
        streams.enter(stream, lambda stream=stream: done.append(stream), {})
    event = streams.record_event("compute")
    assert done == list(STREAMS)
    assert event.is_done()


@pytest.mark.parametrize("update_at", ["forward", "backward"])
def test_programs_are_reused_after_a_few_steps(update_at: str) -> None:
    plan = replace(LEAST, update_at=update_at, gbs=5, inp_slots=4, rest_slots=3, chunk_tokens=4, levels="FAI" * 3)
    programs = ProgramCache(UNTIED, plan)
    requests = [StepRequest(step_start(plan, step)) for step in range(13)]
    issued = [programs.next(request, following) for request, following in pairwise(requests)]
    assert len({id(program) for program in issued}) <= 6
    assert issued[-1] in issued[:-1]


def test_trainer_frees_its_memory_at_once() -> None:
    """Several runs follow one another in a process: the next finds the device empty."""
    trainer = trainer_of(UNTIED, LEAST)
    trained(trainer, 2)
    arena = ref(trainer.arena)
    del trainer
    assert arena() is None
