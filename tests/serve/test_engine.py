"""Whatever is computed beside it, in chunks, again after preemption or not at all thanks to the prefix cache, a request
gets the answer it would get alone; each ends exactly once, and no block or slot is lost."""

import random
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from oracle_runner import VOCABULARY, OracleRunner, plain_answer

from llmb.serve.admission import Outlook
from llmb.serve.block_pool import BlockPool
from llmb.serve.engine import Engine, Load
from llmb.serve.request import Answer, Request
from llmb.serve.scheduler import Scheduler
from llmb.serve.step_batch import Plan
from llmb.serve.step_limits import Limits


@dataclass
class Heard:
    """What the callbacks were told."""

    streamed: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)

    def listen(self, request: Request) -> Request:
        self.streamed[request.number] = []
        return replace(request, on_token=self.token, on_end=self.end)

    def token(self, number: int, token: int) -> None:
        assert number not in self.answers, "a token after the end"
        self.streamed[number].append(token)

    def end(self, answer: Answer) -> None:
        assert answer.number not in self.answers, "ended twice"
        self.answers[answer.number] = answer

    def check(self, requests: list[Request], cancelled: set[int]) -> None:
        assert set(self.answers) == {request.number for request in requests}
        for request in requests:
            answer, plain = self.answers[request.number], plain_answer(request)
            assert list(answer.tokens) == self.streamed[request.number]
            if request.number in cancelled:
                assert answer.finish == "cancelled"
                assert plain.tokens[: len(answer.tokens)] == answer.tokens
            else:
                assert answer == plain


def make(blocks=64, block_tokens=4, prefix_cache=False, chain=True, depth=1, lockstep=None, **limits):
    limits = Limits(**{"max_batch_size": 8, "max_num_tokens": 32, "max_length": 1000, **limits})
    scheduler = Scheduler(BlockPool(blocks, block_tokens, prefix_cache), limits, chain=chain, depth=depth)
    runner = OracleRunner(blocks, block_tokens, limits, prefix_cache, chain)
    return Engine(scheduler, runner, depth=depth, lockstep=lockstep)


def check_idle(engine: Engine) -> None:
    pool = engine.scheduler.pool
    pool.check()
    assert engine.load == Load(waiting=0, running=0, blocks_used=0, blocks=pool.blocks)
    assert sorted(engine.scheduler._slots) == list(range(engine.scheduler.limits.max_batch_size))
    assert not engine.runner.unread
    assert not engine.scheduler._unread


def serve(engine: Engine, arrivals: list[tuple[int, Request]], cancels: dict[int, int]) -> Heard:
    """Submit each request at its step, cancel the numbers of `cancels` at theirs, and go on until all have ended."""
    heard, cancelled = Heard(), set()
    step = 0
    queue = sorted(arrivals, key=lambda arrival: arrival[0])
    while True:
        while queue and queue[0][0] <= step:
            engine.submit(heard.listen(queue.pop(0)[1]))
        for number in [number for number, at in cancels.items() if at == step and number in heard.streamed]:
            if engine.cancel(number):
                cancelled.add(number)
            assert not engine.cancel(number)
        if not engine.step() and not queue:
            break
        engine.scheduler.pool.check()
        step += 1
        assert step < 20_000, "no end"
    heard.check([request for _, request in arrivals], cancelled)
    check_idle(engine)
    return heard


@st.composite
def scenes(draw):
    """Engine settings, and requests that each fit into it alone."""
    block_tokens = draw(st.sampled_from([1, 2, 4, 7]))
    setting = {
        "block_tokens": block_tokens,
        "max_batch_size": draw(st.integers(1, 6)),
        "max_num_tokens": draw(st.integers(1, 24)),
        "chunked_prefill": draw(st.booleans()),
        "prefix_cache": draw(st.booleans()),
        "chain": draw(st.booleans()),
        "depth": draw(st.integers(1, 3)),
    }
    longest = 24 if setting["chunked_prefill"] else setting["max_num_tokens"]
    common = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=longest, max_size=longest))
    arrivals = []
    for number in range(draw(st.integers(1, 9))):
        length = draw(st.integers(1, longest))
        alike = draw(st.integers(0, length))
        own = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=length - alike, max_size=length - alike))
        request = Request(
            number=number,
            prompt=[*common[:alike], *own],
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


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_answers_are_those_of_a_request_alone(scene):
    setting, arrivals, cancels = scene
    engine = make(**setting)
    preempted = count_preemptions(engine)
    serve(engine, arrivals, cancels)
    event(f"preempted: {bool(preempted)}")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_nor_do_they_depend_on_foresight(scene):
    """Admitting whatever has room just now means many preemptions; nothing that was generated is lost by them."""
    setting, arrivals, cancels = scene
    engine = make(**setting)
    preempted = count_preemptions(engine)
    with mock.patch.object(Outlook, "admits", return_value=True):
        serve(engine, arrivals, cancels)
    event(f"preempted: {bool(preempted)}")


def count_preemptions(engine: Engine) -> list[int]:
    """A list that gets the number of each sequence that is preempted."""
    numbers, preempt = [], engine.scheduler._preempt

    def counted(sequence):
        numbers.append(sequence.request.number)
        preempt(sequence)

    engine.scheduler._preempt = counted
    return numbers


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_thousand_requests_with_random_cancels(prefix_cache, chain):
    dice = random.Random(7)
    engine = make(
        blocks=60, block_tokens=4, prefix_cache=prefix_cache, chain=chain, depth=2, max_batch_size=24, max_num_tokens=64
    )
    common = [dice.randrange(VOCABULARY) for _ in range(40)]
    arrivals, cancels = [], {}
    for number in range(1000):
        alike = dice.randrange(30)
        prompt = [*common[:alike], *(dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 20)))]
        eos = frozenset({3}) if dice.random() < 0.3 else frozenset()
        arrivals.append(
            (dice.randrange(400), Request(number=number, prompt=prompt, max_tokens=dice.randrange(1, 30), eos=eos))
        )
        if dice.random() < 0.2:
            cancels[number] = dice.randrange(600)
    preempted = count_preemptions(engine)
    heard = serve(engine, arrivals, cancels)
    assert preempted
    assert {answer.finish for answer in heard.answers.values()} == {"length", "stop", "cancelled"}


def test_steps_overlap_reading():
    """Two requests of four tokens: one step for the prompts and three more, each launched before the last is read."""
    engine = make()
    heard = Heard()
    for number in range(2):
        engine.submit(heard.listen(Request(number=number, prompt=[1, 2, number], max_tokens=4)))
    assert engine.step()
    assert heard.streamed == {0: [], 1: []}
    assert engine.step()
    assert [len(tokens) for tokens in heard.streamed.values()] == [1, 1]
    assert len(engine.runner.unread) == 1
    engine.drain()
    assert engine.runner.launches == 4
    check_idle(engine)


def test_a_shared_prefix_is_computed_once():
    engine = make(prefix_cache=True)
    prompt = list(range(10)) * 2
    serve(engine, [(0, Request(number=0, prompt=prompt, max_tokens=3))], {})
    before = engine.runner.computed
    serve(engine, [(0, Request(number=1, prompt=[*prompt, 1, 2], max_tokens=1))], {})
    assert engine.runner.computed - before == 2  # twenty tokens are five whole blocks
    before = engine.runner.computed
    serve(engine, [(0, Request(number=2, prompt=prompt, max_tokens=1))], {})
    assert engine.runner.computed - before == 4  # the last token has to be computed, and blocks are shared whole


def test_callbacks_may_submit_and_cancel():
    engine, heard = make(), Heard()
    requests = [Request(number=n, prompt=[n + 1], max_tokens=6) for n in range(4)]

    def meddle(number, token):
        heard.token(number, token)
        if len(heard.streamed[0]) == 2 and 1 not in heard.answers:
            assert engine.cancel(1)
            engine.submit(heard.listen(requests[3]))

    engine.submit(replace(heard.listen(requests[0]), on_token=meddle))
    for request in requests[1:3]:
        engine.submit(heard.listen(request))
    engine.drain()
    heard.check(requests, {1})
    assert len(heard.answers[1].tokens) == 1  # the second was of the same step, and not taken any more
    check_idle(engine)


def test_cancelling_frees_blocks_at_once():
    engine, heard = make(), Heard()
    engine.submit(heard.listen(Request(number=5, prompt=[1] * 9, max_tokens=6)))
    engine.step()
    assert engine.load == Load(waiting=0, running=1, blocks_used=3, blocks=64)
    assert engine.cancel(5)
    assert engine.load == Load(waiting=0, running=0, blocks_used=0, blocks=64)
    assert heard.answers == {5: Answer(number=5, tokens=(), finish="cancelled")}
    assert not engine.cancel(5)
    assert not engine.cancel(6)
    engine.drain()
    check_idle(engine)


def test_ranks_in_lockstep_launch_equally_often():
    """Two engines with requests of their own; the one that has nothing more to compute launches empty plans."""
    any_busy = True
    engines = [make(lockstep=lambda busy: any_busy) for _ in range(2)]
    heard = Heard()
    long, short = Request(number=0, prompt=[1] * 9, max_tokens=12), Request(number=1, prompt=[2], max_tokens=2)
    engines[0].submit(heard.listen(long))
    engines[1].submit(heard.listen(short))
    plans = record_plans(engines[1])
    while any_busy:
        any_busy = any(engine.scheduler.busy for engine in engines)
        assert [engine.step() for engine in engines] == [any_busy] * 2
        assert engines[0].runner.launches == engines[1].runner.launches
    heard.check([long, short], set())
    assert [bool(plan.parts) for plan in plans[:3]] == [True, True, False]
    for engine in engines:
        check_idle(engine)


def record_plans(engine: Engine) -> list[Plan]:
    plans, launch = [], engine.runner.launch

    def recorded(plan):
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = recorded
    return plans
