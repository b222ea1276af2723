import pytest

from llmb.errors import ConfigError
from llmb.serve.admission import Outlook
from llmb.serve.block_pool import BlockPool
from llmb.serve.request import Request
from llmb.serve.scheduler import Scheduler
from llmb.serve.step_batch import Plan
from llmb.serve.step_limits import Limits


def make(blocks=100, block_tokens=4, prefix_cache=False, chain=True, depth=1, **limits) -> Scheduler:
    limits = Limits(**{"max_batch_size": 8, "max_num_tokens": 32, "max_length": 1000, **limits})
    return Scheduler(BlockPool(blocks, block_tokens, prefix_cache), limits, chain=chain, depth=depth)


def submit(scheduler: Scheduler, *lengths: tuple[int, int], **request) -> None:
    """Requests 0, 1, 2 ... of (prompt, answer) tokens; prompts differ from their first token on."""
    for number, (prompt, answer) in enumerate(lengths):
        tokens = [number] * prompt
        scheduler.submit(Request(number=number, prompt=tokens, max_tokens=answer, **request))


def shape(plan: Plan) -> list[tuple[int, int, int, bool]]:
    """(number, start, count, samples) of each part."""
    return [(part.sequence.request.number, part.start, part.count, part.samples) for part in plan.parts]


def read(scheduler: Scheduler, plan: Plan, token: int = 50) -> list[int]:
    """Take a step in which every token is the same; gives the numbers of those that ended."""
    return [sequence.request.number for sequence in scheduler.took(plan, [token] * len(plan.sampling))]


@pytest.fixture
def blind(monkeypatch):
    """Admission without foresight, so that preemption has something to do."""
    monkeypatch.setattr(Outlook, "admits", lambda self, sequence: True)


def test_decodes_come_first_then_chunks_within_the_budget():
    scheduler = make(max_num_tokens=10)
    submit(scheduler, (3, 9), (12, 9), (5, 9))
    assert shape(scheduler.plan()) == [(0, 0, 3, True), (1, 0, 7, False)]
    second = shape(scheduler.plan())
    assert second == [(0, 3, 1, True), (1, 7, 5, True)], "what fits whole into the next step is not cut for this one"
    assert shape(scheduler.plan()) == [(0, 4, 1, True), (1, 12, 1, True), (2, 0, 5, True)]


def test_a_prompt_that_no_step_takes_whole_is_cut_at_once():
    scheduler = make(max_num_tokens=10)
    submit(scheduler, (3, 9), (11, 9))
    assert shape(scheduler.plan()) == [(0, 0, 3, True), (1, 0, 7, False)]


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole():
    scheduler = make(max_num_tokens=10, chunked_prefill=False)
    submit(scheduler, (3, 2), (8, 9), (1, 9))
    assert shape(scheduler.plan()) == [(0, 0, 3, True)]  # nor may the short one overtake
    assert shape(scheduler.plan()) == [(0, 3, 1, True), (1, 0, 8, True), (2, 0, 1, True)]


def test_a_batch_has_no_more_sequences_than_slots():
    scheduler = make(max_batch_size=2)
    submit(scheduler, (1, 1), (1, 3), (1, 1))
    first = scheduler.plan()
    assert [part.sequence.slot for part in first.parts] == [0, 1]
    second = scheduler.plan()
    assert shape(second) == [(1, 1, 1, True)]
    assert read(scheduler, first) == [0]
    third = scheduler.plan()
    assert shape(third) == [(1, 2, 1, True), (2, 0, 1, True)]
    assert third.parts[1].sequence.slot == 0


def test_nothing_is_planned_beyond_the_limit_of_an_answer():
    scheduler = make()
    submit(scheduler, (4, 2))
    first, second = scheduler.plan(), scheduler.plan()
    assert [shape(first), shape(second)] == [[(0, 0, 4, True)], [(0, 4, 1, True)]]
    assert scheduler.plan() == Plan()
    assert read(scheduler, first) == []
    assert scheduler.plan() == Plan()
    assert read(scheduler, second) == [0]
    assert not scheduler.busy


def test_what_was_computed_after_a_stop_is_dropped():
    scheduler = make()
    submit(scheduler, (4, 9), eos=frozenset({50}))
    first, second = scheduler.plan(), scheduler.plan()
    sequence = first.parts[0].sequence
    assert read(scheduler, first) == [0]
    assert scheduler.pool.used == 0
    assert read(scheduler, second) == []
    assert (sequence.tokens[4:], sequence.finish) == ([50], "stop")


def test_the_last_admitted_is_preempted_and_returns_to_the_front(blind):
    """Three sequences fill the pool; as the first two need more blocks, the third and then the second give way."""
    scheduler = make(blocks=4, block_tokens=2)
    submit(scheduler, (2, 6), (2, 6), (3, 6), (1, 1))
    first = scheduler.plan()
    assert shape(first) == [(0, 0, 2, True), (1, 0, 2, True), (2, 0, 3, True)]
    second = scheduler.plan()
    assert shape(second) == [(0, 2, 1, True), (1, 2, 1, True)]
    assert list(scheduler.waiting) == [2, 3]
    third = scheduler.plan()
    assert shape(third) == [(0, 3, 1, True), (1, 3, 1, True)]
    fourth = scheduler.plan()
    assert shape(fourth) == [(0, 4, 1, True)]
    assert list(scheduler.waiting) == [1, 2, 3]
    victim = scheduler.waiting[1]
    assert (victim.slot, victim.blocks, victim.computed, victim.pending) == (None, [], 0, 3)


def test_a_preempted_sequence_waits_for_its_unread_tokens_and_goes_on_with_them(blind):
    scheduler = make(blocks=3, block_tokens=2)
    submit(scheduler, (2, 3), (2, 3))
    first, second = scheduler.plan(), scheduler.plan()
    assert shape(second) == [(0, 2, 1, True)]
    scheduler.cancel(0)
    assert scheduler.plan() == Plan()  # there is room for the other now, but its token is still on the device
    read(scheduler, first)
    assert shape(scheduler.plan()) == [(1, 0, 3, True)]
    assert scheduler.running[1].tokens == [1, 1, 50]


def test_what_is_preempted_does_not_come_back_in_the_same_step(blind):
    scheduler = make(blocks=5, block_tokens=2, max_num_tokens=3)
    submit(scheduler, (2, 6), (9, 1))
    for _ in range(3):
        scheduler.plan()
    assert (scheduler.running[1].computed, scheduler.pool.free) == (5, 0)
    assert shape(scheduler.plan()) == [(0, 4, 1, True)]
    assert list(scheduler.waiting) == [1]
    assert scheduler.pool.free == 2


def test_a_prompt_that_an_older_one_preempts_is_not_computed_on(blind):
    scheduler = make(blocks=4, block_tokens=2, max_num_tokens=4, chain=False, depth=2)
    submit(scheduler, (5, 1), (6, 1))
    plans = [scheduler.plan(), scheduler.plan()]
    assert [shape(plan) for plan in plans] == [[(0, 0, 4, False)], [(1, 0, 4, False)]]
    for plan in plans:
        read(scheduler, plan)
    assert shape(scheduler.plan()) == [(0, 4, 1, True)]
    assert list(scheduler.waiting) == [1]


def test_a_preempted_chunk_is_read_before_its_sequence_begins_again(blind):
    scheduler = make(blocks=2, block_tokens=2, max_num_tokens=2, chain=False, depth=2)
    submit(scheduler, (2, 2), (3, 1))
    first, second = scheduler.plan(), scheduler.plan()
    assert shape(second) == [(1, 0, 2, False)]
    read(scheduler, first)
    assert shape(scheduler.plan()) == [(0, 2, 1, True)]
    scheduler.cancel(0)
    assert scheduler.plan() == Plan()
    read(scheduler, second)
    assert shape(scheduler.plan()) == [(1, 0, 2, False)]


def test_a_preempted_sequence_may_end_in_the_queue(blind):
    scheduler = make(blocks=3, block_tokens=2)
    submit(scheduler, (2, 3), (2, 3), eos=frozenset({50}))
    first, _ = scheduler.plan(), scheduler.plan()
    assert list(scheduler.waiting) == [1]
    assert read(scheduler, first) == [0, 1]
    assert not scheduler.busy
    assert scheduler.pool.used == 0


def test_without_chaining_the_sequences_take_turns():
    scheduler = make(chain=False, depth=2)
    submit(scheduler, *[(2, 5)] * 5)
    prompts = scheduler.plan()
    assert len(prompts.parts) == 5
    assert scheduler.plan() == Plan()
    read(scheduler, prompts)
    one, other = scheduler.plan(), scheduler.plan()
    assert [part[0] for part in shape(one)] == [0, 1, 2]
    assert [part[0] for part in shape(other)] == [3, 4]
    assert scheduler.plan() == Plan()
    read(scheduler, one)
    assert shape(scheduler.plan()) == [(number, 3, 1, True) for number in (0, 1, 2)]


def test_without_chaining_the_chunks_of_a_prompt_wait_for_one_another():
    scheduler = make(chain=False, depth=2, max_num_tokens=4)
    submit(scheduler, (6, 1), (3, 1))
    first, second = scheduler.plan(), scheduler.plan()
    assert shape(first) == [(0, 0, 4, False)]
    assert shape(second) == [(1, 0, 3, True)]
    assert scheduler.plan() == Plan()
    read(scheduler, first)
    assert shape(scheduler.plan()) == [(0, 4, 2, True)]


def test_a_prefix_hit_is_never_the_whole_sequence():
    scheduler = make(prefix_cache=True)
    submit(scheduler, (8, 1))
    read(scheduler, scheduler.plan())
    submit(scheduler, (8, 1))
    assert shape(scheduler.plan()) == [(0, 4, 4, True)]


def test_equal_schedulers_decide_alike():
    plans = []
    for _ in range(2):
        scheduler = make(blocks=12, max_num_tokens=9, prefix_cache=True)
        submit(scheduler, *[(3 + number, 12) for number in range(9)], eos=frozenset({7}))
        scheduler.cancel(4)
        history = []
        while scheduler.busy:
            plan = scheduler.plan()
            history.append((shape(plan), [(part.sequence.slot, *part.sequence.blocks) for part in plan.parts]))
            read(scheduler, plan, token=len(history) % 13)
        plans.append(history)
    assert plans[0] == plans[1]


def test_a_number_is_used_once_at_a_time():
    scheduler = make()
    submit(scheduler, (1, 1))
    with pytest.raises(ConfigError, match="request 0 is already under way"):
        submit(scheduler, (1, 1))


def test_what_does_not_fit_is_refused_and_leaves_no_trace():
    scheduler = make(blocks=2)
    with pytest.raises(ConfigError, match="need 3 blocks of 4 tokens"):
        submit(scheduler, (5, 5))
    assert not scheduler.busy
    assert scheduler.cancel(0) is None
