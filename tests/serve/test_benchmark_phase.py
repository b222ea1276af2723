"""The driver of a phase over the real scheduler: who is in flight when, and what is written down about it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_runner import OracleRunner

from llmb.config.spec import Inference
from llmb.events import RequestDone, ServingSample, read
from llmb.runtime.recorder import Record
from llmb.serve.benchmark.arrivals import Load, load_of
from llmb.serve.benchmark.benchmark_phase import Phase
from llmb.serve.benchmark.prompts import Draw, Prompt, Terms
from llmb.serve.benchmark.request_recorder import TIMES_A_STEP, Flight, Journal, StepClock
from llmb.serve.block_pool import BlockPool
from llmb.serve.engine import Engine
from llmb.serve.request import Answer
from llmb.serve.scheduler import Scheduler
from llmb.serve.step_limits import Limits

WORK = Inference(
    mode="max_throughput",
    use_case="chat",
    isl=5,
    osl=4,
    max_batch_size=4,
    concurrency=3,
    max_num_tokens=16,
    kv_fraction=0.5,
    num_requests=8,
)


class WatchedEngine(Engine):
    """Keeps account of how many requests it has at most."""

    most = 0

    def submit(self, request) -> None:
        super().submit(request)
        self.most = max(self.most, self.load.waiting + self.load.running)


def engine(blocks: int = 40, lockstep: Callable[[bool], bool] | None = None) -> WatchedEngine:
    limits = Limits(max_batch_size=4, max_num_tokens=16, max_length=1000)
    scheduler = Scheduler(BlockPool(blocks, 4, False), limits)
    return WatchedEngine(scheduler, OracleRunner(blocks, 4, limits), lockstep=lockstep)


def prompts(*lengths: tuple[int, int]) -> list[Prompt]:
    return Draw(0, Terms(11)).prompts(lengths)


def run(folder, load: Load, work: Inference = WORK, on: Engine | None = None, warmup: bool = False) -> list:
    record = Record(folder, 0)
    record.path.unlink(missing_ok=True)
    journal = Journal(record, len(load.prompts), warmup)
    Phase(on or engine(), work, frozenset(), load, journal).run()
    journal.write_all()
    return list(read(record.path))


def requests(events: list) -> list[RequestDone]:
    return sorted((e for e in events if isinstance(e, RequestDone)), key=lambda e: e.request)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=20),
    concurrency=st.integers(1, 25),
    streaming=st.booleans(),
    blocks=st.integers(12, 40),
)
def test_every_request_is_recorded_once_and_never_too_many_are_in_flight(
    tmp_path_factory, lengths, concurrency, streaming, blocks
) -> None:
    on = engine(blocks)
    events = run(
        tmp_path_factory.mktemp("run"),
        load_of(prompts(*lengths), concurrency),
        replace(WORK, streaming=streaming),
        on=on,
    )
    found = requests(events)
    assert [r.request for r in found] == list(range(len(lengths)))
    assert [(r.input_tokens, r.output_tokens) for r in found] == lengths
    assert all(r.requested_tokens == r.output_tokens and r.finish == "length" and not r.warmup for r in found)
    assert on.most == min(concurrency, len(lengths))
    ends = {r.end for r in found}
    for number, r in enumerate(found):
        assert r.arrival == 0.0 if number < concurrency else r.arrival in ends  # at once, or when another ends
        assert len(r.token_times) == (r.output_tokens if streaming else 0)
        assert list(r.token_times) == sorted(r.token_times)
        assert (r.first_token, r.end) == (
            (r.token_times[0], r.token_times[-1]) if streaming else (None, max(r.end, r.arrival))
        )
    in_flight = [sum(r.arrival <= moment < r.end for r in found) for moment in sorted(ends)]
    assert max(in_flight, default=0) <= concurrency
    assert on.load.blocks_used == 0


def test_samples_tell_how_far_it_is(tmp_path) -> None:
    events = run(tmp_path, load_of(prompts(*[(5, 4)] * 8), 3), warmup=True)
    last = [e for e in events if isinstance(e, ServingSample)][-1]
    assert (last.done, last.requests, last.output_tokens, last.warmup) == (8, 8, 32, True)
    assert (last.waiting, last.running, last.blocks_used, last.blocks) == (0, 0, 0, 40)
    assert last.elapsed_s >= max(r.end for r in requests(events))
    assert all(r.warmup for r in requests(events))


def test_a_rank_that_does_not_record_drives_alike(tmp_path) -> None:
    load = load_of(prompts(*[(5, 4), (9, 2), (3, 7)] * 4), 2)
    recording, silent = engine(), engine()
    run(tmp_path, load, on=recording)
    Phase(silent, WORK, frozenset(), load, None).run()
    assert silent.runner.launches == recording.runner.launches
    assert silent.runner.computed == recording.runner.computed


class Lockstep:
    """Asked by several threads at once, each for its rank: whether any of them has work."""

    def __init__(self, ranks: int):
        self._barrier, self._busy = threading.Barrier(ranks, timeout=30), [False] * ranks

    def of(self, rank: int) -> Callable[[bool], bool]:
        def ask(busy: bool) -> bool:
            self._busy[rank] = busy
            self._barrier.wait()
            found = any(self._busy)
            self._barrier.wait()
            return found

        return ask


@pytest.mark.parametrize("concurrency", [1, 2, 5, 100])
def test_ranks_with_requests_of_their_own_end_together(tmp_path, concurrency: int) -> None:
    load, lockstep = load_of(prompts(*[(5, 4), (9, 2), (3, 30)] * 4), concurrency), Lockstep(3)
    engines = [engine(lockstep=lockstep.of(rank)) for rank in range(3)]
    records = [Record(tmp_path, rank) for rank in range(3)]

    def drive(rank: int) -> None:
        share = load.share(rank, 3)
        journal = Journal(records[rank], len(share.prompts), False)
        Phase(engines[rank], WORK, frozenset(), share, journal).run()
        journal.write_all()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(drive, range(3)))
    assert len({one.runner.launches for one in engines}) == 1
    found = requests([event for record in records for event in read(record.path)])
    assert [r.request for r in found] == list(range(12))
    assert sum(one.most for one in engines) == min(concurrency, 12)


def test_an_end_token_ends_an_answer_where_it_may(tmp_path) -> None:
    load = load_of(prompts((5, 200)), 1)
    everything = frozenset(range(11))
    for ignore, output, finish in ((True, 200, "length"), (False, 1, "stop")):
        journal = Journal(Record(tmp_path, int(ignore)), 1, False)
        Phase(engine(60), replace(WORK, ignore_eos=ignore), everything, load, journal).run()
        journal.write_all()
        (r,) = requests(list(read(tmp_path / f"events.rank{int(ignore)}.jsonl")))
        assert (r.output_tokens, r.requested_tokens, r.finish, r.rank) == (output, 200, finish, int(ignore))


def test_an_engine_that_forgets_a_request_is_found_out(tmp_path) -> None:
    class Forgetful(WatchedEngine):
        def step(self) -> bool:
            return False

    broken = engine()
    broken.__class__ = Forgetful
    with pytest.raises(RuntimeError, match="nothing left to do, but 8 of 8 requests"):
        run(tmp_path, load_of(prompts(*[(5, 4)] * 8), 3), on=broken)


def test_many_that_end_together_are_written_over_several_steps(tmp_path) -> None:
    record, clock = Record(tmp_path, 0), StepClock()
    journal = Journal(record, 10, False)
    for number in range(10):
        flight = Flight(number, Prompt([1], TIMES_A_STEP // 2), clock, 0.0)
        for token in range(TIMES_A_STEP // 2):
            flight.heard(number, token)
        flight.ended(Answer(number=number, tokens=(0,) * (TIMES_A_STEP // 2), finish="length"))
        journal.ended(flight)
    journal.write_some()
    assert len(list(read(record.path))) == 2
    journal.write_all()
    assert [r.request for r in read(record.path)] == list(range(10))


def test_the_clock_stands_still_within_a_step() -> None:
    clock = StepClock()
    assert clock.now() == clock.now() == 0.0
    clock.turn()
    first = clock.now()
    assert first == clock.now() > 0.0
    assert clock.elapsed() >= first
