import pytest

from llmb.errors import ConfigError
from llmb.serve.admission import AdmissionCheck, SchedulerLimits
from llmb.serve.kv_cache.block_pool import BlockPool
from llmb.serve.request import Request
from llmb.serve.scheduler import Scheduler
from llmb.serve.step_batch import StepBatch


def make(blocks=100, block_tokens=4, prefix_cache=False, async_scheduling=True, depth=1, **limits) -> Scheduler:
    limits = SchedulerLimits(**{"max_batch_size": 8, "max_num_tokens": 32, "max_seq_len": 1000, **limits})
    return Scheduler(
        BlockPool(blocks, block_tokens, prefix_cache), limits, async_scheduling=async_scheduling, depth=depth
    )


def submit(scheduler: Scheduler, *lengths: tuple[int, int], **request) -> None:
    """Submit requests 0, 1, 2 ... of (input, output) tokens; prompts differ from the first token on."""
    for number, (prompt, output) in enumerate(lengths):
        tokens = [number] * prompt
        scheduler.submit(Request(request_id=number, prompt=tokens, max_tokens=output, **request))


def shape(batch: StepBatch) -> list[tuple[int, int, int, bool]]:
    """Return (request_id, start, num_tokens, samples) of each chunk."""
    return [(chunk.sequence.request.request_id, chunk.start, chunk.num_tokens, chunk.samples) for chunk in batch.chunks]


def read(scheduler: Scheduler, batch: StepBatch, token: int = 50) -> list[int]:
    """Read a step whose tokens are all the same; return the ids of the finished requests."""
    return [
        sequence.request.request_id
        for sequence in scheduler.update_from_output(batch, [token] * len(batch.sampling_chunks))
    ]


@pytest.fixture
def blind(monkeypatch):
    """Disable the admission check, so that sequences are preempted."""
    monkeypatch.setattr(AdmissionCheck, "try_admit", lambda self, sequence: True)


def test_decodes_come_before_prefill_chunks():
    scheduler = make(max_num_tokens=10)
    submit(scheduler, (3, 9), (12, 9), (5, 9))
    assert shape(scheduler.schedule()) == [(0, 0, 3, True), (1, 0, 7, False)]
    second = shape(scheduler.schedule())
    assert second == [(0, 3, 1, True), (1, 7, 5, True)], (
        "a prompt that fits into the next step is not chunked for this one"
    )
    assert shape(scheduler.schedule()) == [(0, 4, 1, True), (1, 12, 1, True), (2, 0, 5, True)]


def test_prompt_longer_than_a_step_is_chunked_immediately():
    scheduler = make(max_num_tokens=10)
    submit(scheduler, (3, 9), (11, 9))
    assert shape(scheduler.schedule()) == [(0, 0, 3, True), (1, 0, 7, False)]


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step():
    scheduler = make(max_num_tokens=10, chunked_prefill=False)
    submit(scheduler, (3, 2), (8, 9), (1, 9))
    assert shape(scheduler.schedule()) == [(0, 0, 3, True)]  # the short one must not overtake
    assert shape(scheduler.schedule()) == [(0, 3, 1, True), (1, 0, 8, True), (2, 0, 1, True)]


def test_batch_size_is_limited_by_slots():
    scheduler = make(max_batch_size=2)
    submit(scheduler, (1, 1), (1, 3), (1, 1))
    first = scheduler.schedule()
    assert [chunk.sequence.slot for chunk in first.chunks] == [0, 1]
    second = scheduler.schedule()
    assert shape(second) == [(1, 1, 1, True)]
    assert read(scheduler, first) == [0]
    third = scheduler.schedule()
    assert shape(third) == [(1, 2, 1, True), (2, 0, 1, True)]
    assert third.chunks[1].sequence.slot == 0


def test_nothing_is_scheduled_beyond_max_tokens():
    scheduler = make()
    submit(scheduler, (4, 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [shape(first), shape(second)] == [[(0, 0, 4, True)], [(0, 4, 1, True)]]
    assert scheduler.schedule() == StepBatch()
    assert read(scheduler, first) == []
    assert scheduler.schedule() == StepBatch()
    assert read(scheduler, second) == [0]
    assert not scheduler.has_unfinished_requests


def test_tokens_after_a_stop_are_dropped():
    scheduler = make()
    submit(scheduler, (4, 9), eos=frozenset({50}))
    first, second = scheduler.schedule(), scheduler.schedule()
    sequence = first.chunks[0].sequence
    assert read(scheduler, first) == [0]
    assert scheduler.pool.num_used == 0
    assert read(scheduler, second) == []
    assert (sequence.token_ids[4:], sequence.finish_reason) == ([50], "stop")


def test_last_admitted_is_preempted_to_the_front_of_the_queue(blind):
    """Three sequences fill the pool; as the first two need more blocks, the third and then the second are preempted."""
    scheduler = make(blocks=4, block_tokens=2)
    submit(scheduler, (2, 6), (2, 6), (3, 6), (1, 1))
    first = scheduler.schedule()
    assert shape(first) == [(0, 0, 2, True), (1, 0, 2, True), (2, 0, 3, True)]
    second = scheduler.schedule()
    assert shape(second) == [(0, 2, 1, True), (1, 2, 1, True)]
    assert list(scheduler.waiting) == [2, 3]
    third = scheduler.schedule()
    assert shape(third) == [(0, 3, 1, True), (1, 3, 1, True)]
    fourth = scheduler.schedule()
    assert shape(fourth) == [(0, 4, 1, True)]
    assert list(scheduler.waiting) == [1, 2, 3]
    victim = scheduler.waiting[1]
    assert (victim.slot, victim.block_ids, victim.num_computed_tokens, victim.num_pending_tokens) == (None, [], 0, 3)


def test_preempted_sequence_resumes_with_its_pending_tokens(blind):
    scheduler = make(blocks=3, block_tokens=2)
    submit(scheduler, (2, 3), (2, 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shape(second) == [(0, 2, 1, True)]
    scheduler.cancel(0)
    assert scheduler.schedule() == StepBatch()  # there are free blocks for the other, but its token is pending
    read(scheduler, first)
    assert shape(scheduler.schedule()) == [(1, 0, 3, True)]
    assert scheduler.running[1].token_ids == [1, 1, 50]


def test_preempted_sequence_is_not_readmitted_in_the_same_step(blind):
    scheduler = make(blocks=5, block_tokens=2, max_num_tokens=3)
    submit(scheduler, (2, 6), (9, 1))
    for _ in range(3):
        scheduler.schedule()
    assert (scheduler.running[1].num_computed_tokens, scheduler.pool.num_free) == (5, 0)
    assert shape(scheduler.schedule()) == [(0, 4, 1, True)]
    assert list(scheduler.waiting) == [1]
    assert scheduler.pool.num_free == 2


def test_preempted_prefill_is_not_scheduled(blind):
    scheduler = make(blocks=4, block_tokens=2, max_num_tokens=4, async_scheduling=False, depth=2)
    submit(scheduler, (5, 1), (6, 1))
    batches = [scheduler.schedule(), scheduler.schedule()]
    assert [shape(batch) for batch in batches] == [[(0, 0, 4, False)], [(1, 0, 4, False)]]
    for batch in batches:
        read(scheduler, batch)
    assert shape(scheduler.schedule()) == [(0, 4, 1, True)]
    assert list(scheduler.waiting) == [1]


def test_preempted_chunk_is_read_before_its_sequence_restarts(blind):
    scheduler = make(blocks=2, block_tokens=2, max_num_tokens=2, async_scheduling=False, depth=2)
    submit(scheduler, (2, 2), (3, 1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shape(second) == [(1, 0, 2, False)]
    read(scheduler, first)
    assert shape(scheduler.schedule()) == [(0, 2, 1, True)]
    scheduler.cancel(0)
    assert scheduler.schedule() == StepBatch()
    read(scheduler, second)
    assert shape(scheduler.schedule()) == [(1, 0, 2, False)]


def test_preempted_sequence_may_finish_in_the_queue(blind):
    scheduler = make(blocks=3, block_tokens=2)
    submit(scheduler, (2, 3), (2, 3), eos=frozenset({50}))
    first, _ = scheduler.schedule(), scheduler.schedule()
    assert list(scheduler.waiting) == [1]
    assert read(scheduler, first) == [0, 1]
    assert not scheduler.has_unfinished_requests
    assert scheduler.pool.num_used == 0


def test_without_async_scheduling_decodes_alternate():
    scheduler = make(async_scheduling=False, depth=2)
    submit(scheduler, *[(2, 5)] * 5)
    prompts = scheduler.schedule()
    assert len(prompts.chunks) == 5
    assert scheduler.schedule() == StepBatch()
    read(scheduler, prompts)
    batch_a, batch_b = scheduler.schedule(), scheduler.schedule()
    assert [chunk[0] for chunk in shape(batch_a)] == [0, 1, 2]
    assert [chunk[0] for chunk in shape(batch_b)] == [3, 4]
    assert scheduler.schedule() == StepBatch()
    read(scheduler, batch_a)
    assert shape(scheduler.schedule()) == [(number, 3, 1, True) for number in (0, 1, 2)]


def test_without_async_scheduling_chunks_wait_for_one_another():
    scheduler = make(async_scheduling=False, depth=2, max_num_tokens=4)
    submit(scheduler, (6, 1), (3, 1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shape(first) == [(0, 0, 4, False)]
    assert shape(second) == [(1, 0, 3, True)]
    assert scheduler.schedule() == StepBatch()
    read(scheduler, first)
    assert shape(scheduler.schedule()) == [(0, 4, 2, True)]


def test_prefix_hit_is_never_the_whole_sequence():
    scheduler = make(prefix_cache=True)
    submit(scheduler, (8, 1))
    read(scheduler, scheduler.schedule())
    submit(scheduler, (8, 1))
    assert shape(scheduler.schedule()) == [(0, 4, 4, True)]


def test_scheduling_is_deterministic():
    batches = []
    for _ in range(2):
        scheduler = make(blocks=12, max_num_tokens=9, prefix_cache=True)
        submit(scheduler, *[(3 + number, 12) for number in range(9)], eos=frozenset({7}))
        scheduler.cancel(4)
        history = []
        while scheduler.has_unfinished_requests:
            batch = scheduler.schedule()
            history.append((shape(batch), [(chunk.sequence.slot, *chunk.sequence.block_ids) for chunk in batch.chunks]))
            read(scheduler, batch, token=len(history) % 13)
        batches.append(history)
    assert batches[0] == batches[1]


def test_duplicate_request_id_is_refused():
    scheduler = make()
    submit(scheduler, (1, 1))
    with pytest.raises(ConfigError, match="request 0 is not finished yet"):
        submit(scheduler, (1, 1))


def test_refused_request_leaves_no_state():
    scheduler = make(blocks=2)
    with pytest.raises(ConfigError, match="need 3 blocks of 4 tokens"):
        submit(scheduler, (5, 5))
    assert not scheduler.has_unfinished_requests
    assert scheduler.cancel(0) is None
