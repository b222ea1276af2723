"""Outputs do not depend on batching, chunked prefill, preemption or the prefix cache; every request ends exactly once,
and no block or slot is lost."""

import random
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from oracle_runner import VOCABULARY, OracleRunner, expected_output
from output_collector import OutputCollector

from llmb.perfmodel.serving_time.cache_blocks import window_blocks
from llmb.perfmodel.serving_time.request_waves import balanced_batch
from llmb.serve.admission import AdmissionCheck, SchedulerLimits
from llmb.serve.engine import Engine, EngineStats
from llmb.serve.kv_cache.block_pool import BlockPool
from llmb.serve.kv_cache.window_blocks import WindowBlocks
from llmb.serve.request import Request, RequestOutput
from llmb.serve.scheduler import Scheduler
from llmb.serve.step_batch import StepBatch


class CheckedOutputs(OutputCollector):
    """Outputs that are compared with those of requests served alone."""

    def check(self, requests: list[Request], cancelled: set[int]) -> None:
        assert set(self.outputs) == {request.request_id for request in requests}
        for request in requests:
            output, plain = self.outputs[request.request_id], expected_output(request)
            if request.request_id in cancelled:
                assert output.finish_reason == "cancelled"
                assert plain.token_ids[: len(output.token_ids)] == output.token_ids
            else:
                assert output == plain


def make(
    blocks=64, block_tokens=4, prefix_cache=False, async_scheduling=True, depth=1, lockstep=None, window=None, **limits
):
    limits = SchedulerLimits(**{"max_batch_size": 8, "max_num_tokens": 32, "max_seq_len": 1000, **limits})
    windows = windows_for(blocks, block_tokens, window, limits)
    scheduler = Scheduler(
        BlockPool(blocks, block_tokens, prefix_cache), limits, async_scheduling, depth=depth, windows=windows
    )
    runner = OracleRunner(blocks, block_tokens, limits, prefix_cache, async_scheduling, windows)
    return Engine(scheduler, runner, depth=depth, lockstep=lockstep)


def windows_for(blocks: int, block_tokens: int, window: int | None, limits: SchedulerLimits) -> WindowBlocks | None:
    """Return as few window blocks as an engine has for a full batch, or as many as the others if that is fewer."""
    if window is None:
        return None
    sizes = {name: getattr(limits, name) for name in ("max_seq_len", "max_batch_size", "max_num_tokens")}
    return WindowBlocks(
        min(blocks, window_blocks(window=window, block_tokens=block_tokens, **sizes)), block_tokens, window
    )


def check_idle(engine: Engine) -> None:
    pool, windows = engine.scheduler.pool, engine.scheduler.windows
    pool.check_consistency()
    if windows is not None:
        windows.pool.check_consistency()
        assert windows.pool.num_used == 0
    assert engine.stats == EngineStats(waiting=0, running=0, blocks_used=0, blocks=pool.num_blocks)
    assert sorted(engine.scheduler._free_slots) == list(range(engine.scheduler.limits.max_batch_size))
    assert not engine.runner.unread
    assert not engine.scheduler._unread


def serve(engine: Engine, arrivals: list[tuple[int, Request]], cancels: dict[int, int]) -> CheckedOutputs:
    """Submit each request at its step, cancel those of `cancels` at theirs, and step until all have ended."""
    collector, cancelled = CheckedOutputs(), set()
    step = 0
    queue = sorted(arrivals, key=lambda arrival: arrival[0])
    while True:
        while queue and queue[0][0] <= step:
            engine.submit(collector.listen(queue.pop(0)[1]))
        for number in [number for number, at in cancels.items() if at == step and number in collector.streamed]:
            if engine.cancel(number):
                cancelled.add(number)
            assert not engine.cancel(number)
        if not engine.step() and not queue:
            break
        engine.scheduler.pool.check_consistency()
        step += 1
        assert step < 20_000, "no end"
    collector.check([request for _, request in arrivals], cancelled)
    check_idle(engine)
    return collector


@st.composite
def scenarios(draw):
    """Draw engine settings, and requests that each fit into the engine alone."""
    block_tokens = draw(st.sampled_from([1, 2, 4, 7]))
    setting = {
        "block_tokens": block_tokens,
        "max_batch_size": draw(st.integers(1, 6)),
        "max_num_tokens": draw(st.integers(1, 24)),
        "chunked_prefill": draw(st.booleans()),
        "window": (window := draw(st.sampled_from([None, 1, 2, 5, 9]))),
        "prefix_cache": window is None and draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "depth": draw(st.integers(1, 3)),
    }
    longest = 24 if setting["chunked_prefill"] else setting["max_num_tokens"]
    common = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=longest, max_size=longest))
    arrivals = []
    for number in range(draw(st.integers(1, 9))):
        length = draw(st.integers(1, longest))
        common_len = draw(st.integers(0, length))
        suffix = draw(
            st.lists(st.integers(0, VOCABULARY - 1), min_size=length - common_len, max_size=length - common_len)
        )
        request = Request(
            request_id=number,
            prompt=[*common[:common_len], *suffix],
            max_tokens=draw(st.integers(1, 20)),
            eos=frozenset(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2))),
            ignore_eos=draw(st.booleans()),
            stop=tuple(draw(st.lists(st.tuples(*[st.integers(0, VOCABULARY - 1)] * 2), max_size=3))),
        )
        arrivals.append((draw(st.integers(0, 12)), request))
    need = max(-(-(len(r.prompt) + r.max_tokens - 1) // block_tokens) for _, r in arrivals)
    setting["blocks"] = need + draw(st.sampled_from([0, 1, 3, 8, 100]))
    cancels = draw(st.dictionaries(st.integers(0, 8), st.integers(0, 25), max_size=3))
    return setting, arrivals, cancels


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_outputs_equal_those_of_a_request_alone(scenario):
    setting, arrivals, cancels = scenario
    engine = make(**setting)
    preempted = count_preemptions(engine)
    serve(engine, arrivals, cancels)
    event(f"preempted: {bool(preempted)}")


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_outputs_do_not_depend_on_admission_check(scenario):
    """Admission without prediction means many preemptions; no generated token is lost by them."""
    setting, arrivals, cancels = scenario
    engine = make(**setting)
    preempted = count_preemptions(engine)
    with mock.patch.object(AdmissionCheck, "try_admit", return_value=True):
        serve(engine, arrivals, cancels)
    event(f"preempted: {bool(preempted)}")


def count_preemptions(engine: Engine) -> list[int]:
    """Return a list to which the id of each preempted request is appended."""
    numbers, preempt = [], engine.scheduler._preempt

    def counted(sequence):
        numbers.append(sequence.request.request_id)
        preempt(sequence)

    engine.scheduler._preempt = counted
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_thousand_requests_with_random_cancels(prefix_cache, async_scheduling):
    rng = random.Random(7)
    engine = make(
        blocks=60,
        block_tokens=4,
        prefix_cache=prefix_cache,
        async_scheduling=async_scheduling,
        depth=2,
        max_batch_size=24,
        max_num_tokens=64,
    )
    common = [rng.randrange(VOCABULARY) for _ in range(40)]
    arrivals, cancels = [], {}
    for number in range(1000):
        common_len = rng.randrange(30)
        prompt = [*common[:common_len], *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20)))]
        eos = frozenset({3}) if rng.random() < 0.3 else frozenset()
        arrivals.append(
            (rng.randrange(400), Request(request_id=number, prompt=prompt, max_tokens=rng.randrange(1, 30), eos=eos))
        )
        if rng.random() < 0.2:
            cancels[number] = rng.randrange(600)
    preempted = count_preemptions(engine)
    collector = serve(engine, arrivals, cancels)
    assert preempted
    assert {output.finish_reason for output in collector.outputs.values()} == {"length", "stop", "cancelled"}


def test_few_requests_beyond_the_batch_take_no_wave_of_their_own():
    """900 requests at 896 at once, an eighth of both: steps against those of an engine with a slot for each."""

    def launches(batch: int) -> int:
        engine = make(blocks=batch * 16, max_batch_size=batch, max_num_tokens=256)  # whole requests of a full batch
        for number in range(113):
            engine.submit(Request(request_id=number, prompt=[number % VOCABULARY] * 16, max_tokens=48))
        engine.drain()
        return engine.runner.launches

    prefill, decode = 113 * 16 // 256 + 1, 48 - 1
    assert launches(112) > 1.7 * (prefill + decode)  # the last request runs alone for as long as all others
    assert launches(balanced_batch(112, 113, 113)) < 1.05 * (prefill + decode)


def test_next_step_is_launched_before_the_last_is_read():
    """Two requests of four tokens: one step for the prompts and three more, each launched before the last is read."""
    engine = make()
    collector = CheckedOutputs()
    for number in range(2):
        engine.submit(collector.listen(Request(request_id=number, prompt=[1, 2, number], max_tokens=4)))
    assert engine.step()
    assert collector.streamed == {0: [], 1: []}
    assert engine.step()
    assert [len(tokens) for tokens in collector.streamed.values()] == [1, 1]
    assert len(engine.runner.unread) == 1
    engine.drain()
    assert engine.runner.launches == 4
    check_idle(engine)


def test_cached_prefix_is_computed_once():
    engine = make(prefix_cache=True)
    prompt = list(range(10)) * 2
    serve(engine, [(0, Request(request_id=0, prompt=prompt, max_tokens=3))], {})
    before = engine.runner.computed
    serve(engine, [(0, Request(request_id=1, prompt=[*prompt, 1, 2], max_tokens=1))], {})
    assert engine.runner.computed - before == 2  # twenty tokens are five whole blocks
    before = engine.runner.computed
    serve(engine, [(0, Request(request_id=2, prompt=prompt, max_tokens=1))], {})
    assert engine.runner.computed - before == 4  # the last token has to be computed, and blocks are shared whole


def test_callbacks_may_submit_and_cancel():
    engine, collector = make(), CheckedOutputs()
    requests = [Request(request_id=n, prompt=[n + 1], max_tokens=6) for n in range(4)]

    def meddle(number, token):
        collector.token(number, token)
        if len(collector.streamed[0]) == 2 and 1 not in collector.outputs:
            assert engine.cancel(1)
            engine.submit(collector.listen(requests[3]))

    engine.submit(replace(collector.listen(requests[0]), on_token=meddle))
    for request in requests[1:3]:
        engine.submit(collector.listen(request))
    engine.drain()
    collector.check(requests, {1})
    assert len(collector.outputs[1].token_ids) == 1  # the second token was of the same step, and dropped
    check_idle(engine)


def test_cancel_frees_blocks_immediately():
    engine, collector = make(), CheckedOutputs()
    engine.submit(collector.listen(Request(request_id=5, prompt=[1] * 9, max_tokens=6)))
    engine.step()
    assert engine.stats == EngineStats(waiting=0, running=1, blocks_used=3, blocks=64)
    assert engine.cancel(5)
    assert engine.stats == EngineStats(waiting=0, running=0, blocks_used=0, blocks=64)
    assert collector.outputs == {5: RequestOutput(request_id=5, token_ids=(), finish_reason="cancelled")}
    assert not engine.cancel(5)
    assert not engine.cancel(6)
    engine.drain()
    check_idle(engine)


def test_ranks_in_lockstep_launch_equally_often():
    """Two engines with their own requests; the one without work launches empty batches."""
    any_busy = True
    engines = [make(lockstep=lambda busy: any_busy) for _ in range(2)]
    collector = CheckedOutputs()
    long, short = Request(request_id=0, prompt=[1] * 9, max_tokens=12), Request(request_id=1, prompt=[2], max_tokens=2)
    engines[0].submit(collector.listen(long))
    engines[1].submit(collector.listen(short))
    batches = record_plans(engines[1])
    while any_busy:
        any_busy = any(engine.scheduler.has_unfinished_requests for engine in engines)
        assert [engine.step() for engine in engines] == [any_busy] * 2
        assert engines[0].runner.launches == engines[1].runner.launches
    collector.check([long, short], set())
    assert [bool(batch.chunks) for batch in batches[:3]] == [True, True, False]
    for engine in engines:
        check_idle(engine)


def record_plans(engine: Engine) -> list[StepBatch]:
    batches, launch = [], engine.runner.launch

    def recorded(batch):
        batches.append(batch)
        return launch(batch)

    engine.runner.launch = recorded
    return batches


def test_start_is_reported_once_with_the_tokens_from_the_prefix_cache():
    engine = make(blocks=6, prefix_cache=True, max_num_tokens=16)
    starts: list[tuple[int, int]] = []
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for number in range(2):
        engine.submit(
            Request(request_id=number, prompt=prompt, max_tokens=12, on_start=lambda *start: starts.append(start))
        )
        engine.drain()
    assert starts == [(0, 0), (1, 8)]
    scheduler = engine.scheduler
    assert (scheduler.num_prefix_queries, scheduler.num_prefix_hits) == (18, 8)
    starts.clear()
    with mock.patch.object(AdmissionCheck, "try_admit", return_value=True):
        for number in range(3):
            prompt = [number] * 6
            engine.submit(
                Request(request_id=number, prompt=prompt, max_tokens=12, on_start=lambda *start: starts.append(start))
            )
        engine.drain()
    assert scheduler.num_preemptions > 0
    assert sorted(starts) == [(0, 0), (1, 0), (2, 0)]
