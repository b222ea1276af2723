"""A benchmark phase over the real scheduler: concurrency and recorded events."""

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
from llmb.loadgen.prompt_sampler import Prompt
from llmb.runtime.recorder import EventRecorder
from llmb.serve.admission import SchedulerLimits
from llmb.serve.benchmark.benchmark_phase import BenchmarkPhase
from llmb.serve.benchmark.prompts import ModelInfo, PromptSampler
from llmb.serve.benchmark.request_load import RequestLoad, make_load, measured_load
from llmb.serve.benchmark.request_recorder import TOKEN_TIMES_PER_STEP, InFlightRequest, PhaseClock, RequestRecorder
from llmb.serve.engine import Engine
from llmb.serve.kv_cache.block_pool import BlockPool
from llmb.serve.request import RequestOutput
from llmb.serve.scheduler import Scheduler

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
    """Records the peak number of its requests."""

    most = 0

    def submit(self, request) -> None:
        super().submit(request)
        self.most = max(self.most, self.stats.waiting + self.stats.running)


def engine(blocks: int = 40, lockstep: Callable[[bool], bool] | None = None) -> WatchedEngine:
    limits = SchedulerLimits(max_batch_size=4, max_num_tokens=16, max_seq_len=1000)
    scheduler = Scheduler(BlockPool(blocks, 4, False), limits)
    return WatchedEngine(scheduler, OracleRunner(blocks, 4, limits), lockstep=lockstep)


def prompts(*lengths: tuple[int, int]) -> list[Prompt]:
    return PromptSampler(0, ModelInfo(11)).prompts(lengths)


def run(folder, load: RequestLoad, work: Inference = WORK, on: Engine | None = None, warmup: bool = False) -> list:
    record = EventRecorder(folder, 0)
    record.path.unlink(missing_ok=True)
    recorder = RequestRecorder(record, len(load.prompts), warmup)
    BenchmarkPhase(on or engine(), work, frozenset(), load, recorder).run()
    recorder.write_all()
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
def test_every_request_is_recorded_once_within_the_concurrency(
    tmp_path_factory, lengths, concurrency, streaming, blocks
) -> None:
    on = engine(blocks)
    events = run(
        tmp_path_factory.mktemp("run"),
        make_load(prompts(*lengths), concurrency),
        replace(WORK, streaming=streaming),
        on=on,
    )
    actual = requests(events)
    assert [r.request for r in actual] == list(range(len(lengths)))
    assert [(r.input_tokens, r.output_tokens) for r in actual] == lengths
    assert all(r.requested_tokens == r.output_tokens and r.finish == "length" and not r.warmup for r in actual)
    assert on.most == min(concurrency, len(lengths))
    ends = {r.end for r in actual}
    for number, r in enumerate(actual):
        assert r.arrival == 0.0 if number < concurrency else r.arrival in ends  # at once, or when another ends
        assert len(r.token_times) == (r.output_tokens if streaming else 0)
        assert list(r.token_times) == sorted(r.token_times)
        assert (r.first_token, r.end) == (
            (r.token_times[0], r.token_times[-1]) if streaming else (None, max(r.end, r.arrival))
        )
    concurrent = [sum(r.arrival <= moment < r.end for r in actual) for moment in sorted(ends)]
    assert max(concurrent, default=0) <= concurrency
    assert on.stats.blocks_used == 0


def test_samples_record_progress(tmp_path) -> None:
    events = run(tmp_path, make_load(prompts(*[(5, 4)] * 8), 3), warmup=True)
    last = [e for e in events if isinstance(e, ServingSample)][-1]
    assert (last.done, last.requests, last.output_tokens, last.warmup) == (8, 8, 32, True)
    assert (last.waiting, last.running, last.blocks_used, last.blocks) == (0, 0, 0, 40)
    assert last.elapsed_s >= max(r.end for r in requests(events))
    assert all(r.warmup for r in requests(events))


def test_rank_without_recorder_launches_the_same_steps(tmp_path) -> None:
    load = make_load(prompts(*[(5, 4), (9, 2), (3, 7)] * 4), 2)
    recording, silent = engine(), engine()
    run(tmp_path, load, on=recording)
    BenchmarkPhase(silent, WORK, frozenset(), load, None).run()
    assert silent.runner.launches == recording.runner.launches
    assert silent.runner.computed == recording.runner.computed


class Lockstep:
    """Tells the threads of all ranks whether any of them has work."""

    def __init__(self, ranks: int):
        self._barrier, self._busy = threading.Barrier(ranks, timeout=30), [False] * ranks

    def of(self, rank: int) -> Callable[[bool], bool]:
        def ask(busy: bool) -> bool:
            self._busy[rank] = busy
            self._barrier.wait()
            actual = any(self._busy)
            self._barrier.wait()
            return actual

        return ask


@pytest.mark.parametrize("concurrency", [1, 2, 5, 100])
def test_data_parallel_ranks_end_together(tmp_path, concurrency: int) -> None:
    load, lockstep = make_load(prompts(*[(5, 4), (9, 2), (3, 30)] * 4), concurrency), Lockstep(3)
    engines = [engine(lockstep=lockstep.of(rank)) for rank in range(3)]
    records = [EventRecorder(tmp_path, rank) for rank in range(3)]

    def drive(rank: int) -> None:
        shard = load.shard(rank, 3)
        recorder = RequestRecorder(records[rank], len(shard.prompts), False)
        BenchmarkPhase(engines[rank], WORK, frozenset(), shard, recorder).run()
        recorder.write_all()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(drive, range(3)))
    assert len({rank_engine.runner.launches for rank_engine in engines}) == 1
    actual = requests([event for record in records for event in read(record.path)])
    assert [r.request for r in actual] == list(range(12))
    assert sum(rank_engine.most for rank_engine in engines) == min(concurrency, 12)


def test_ignore_eos(tmp_path) -> None:
    load = make_load(prompts((5, 200)), 1)
    everything = frozenset(range(11))
    for ignore, output, finish in ((True, 200, "length"), (False, 1, "stop")):
        recorder = RequestRecorder(EventRecorder(tmp_path, int(ignore)), 1, False)
        BenchmarkPhase(engine(60), replace(WORK, ignore_eos=ignore), everything, load, recorder).run()
        recorder.write_all()
        (r,) = requests(list(read(tmp_path / f"events.rank{int(ignore)}.jsonl")))
        assert (r.output_tokens, r.requested_tokens, r.finish, r.rank) == (output, 200, finish, int(ignore))


def test_lost_request_raises(tmp_path) -> None:
    class Forgetful(WatchedEngine):
        def step(self) -> bool:
            return False

    broken = engine()
    broken.__class__ = Forgetful
    with pytest.raises(RuntimeError, match="the engine is idle, but 8 of 8 requests are unfinished"):
        run(tmp_path, make_load(prompts(*[(5, 4)] * 8), 3), on=broken)


def test_writing_is_spread_over_steps(tmp_path) -> None:
    record, clock = EventRecorder(tmp_path, 0), PhaseClock()
    recorder = RequestRecorder(record, 10, False)
    for number in range(10):
        request = InFlightRequest(number, Prompt([1], TOKEN_TIMES_PER_STEP // 2), clock, 0.0)
        for token in range(TOKEN_TIMES_PER_STEP // 2):
            request.on_token(number, token)
        request.on_end(
            RequestOutput(request_id=number, token_ids=(0,) * (TOKEN_TIMES_PER_STEP // 2), finish_reason="length")
        )
        recorder.add(request)
    recorder.write_some()
    assert len(list(read(record.path))) == 2
    recorder.write_all()
    assert [r.request for r in read(record.path)] == list(range(10))


def test_clock_is_constant_within_a_step() -> None:
    clock = PhaseClock()
    assert clock.now() == clock.now() == 0.0
    clock.next_step()
    first = clock.now()
    assert first == clock.now() > 0.0
    assert clock.elapsed() >= first


def test_requests_at_a_rate_are_sent_when_due(tmp_path) -> None:
    work = replace(WORK, rate=400.0, num_requests=12)
    load = measured_load(work, prompts(*[(5, 4)] * 12))
    assert load.due_s is not None
    actual = requests(run(tmp_path, load, work))
    assert [r.scheduled for r in actual] == [round(due, 6) for due in load.due_s]
    assert all(r.arrival >= r.scheduled and r.first_token >= r.arrival for r in actual)
    assert [r.output_tokens for r in actual] == [4] * 12


def test_the_schedule_of_a_rate_depends_on_seed_and_burstiness() -> None:
    lengths = prompts(*[(5, 4)] * 50)
    poisson, repeated, gamma = (
        measured_load(replace(WORK, rate=10.0, burstiness=shape), lengths).due_s for shape in (1.0, 1.0, 0.5)
    )
    assert poisson == repeated != gamma
    assert measured_load(WORK, lengths).due_s is None
