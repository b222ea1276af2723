"""Who sends which requests, and how many are in flight."""

from hypothesis import given
from hypothesis import strategies as st

from llmb.config.spec import Inference
from llmb.serve.benchmark.arrivals import SETTLED, Load, Seat, load_of, seat_of, warmup_load
from llmb.serve.benchmark.prompts import Draw, Prompt, Terms


def load(count: int, concurrency: int) -> Load:
    return load_of([Prompt([number], 1) for number in range(count)], concurrency)


@given(count=st.integers(0, 40), concurrency=st.integers(1, 60), parts=st.integers(1, 9))
def test_shares_make_the_whole_and_keep_to_the_limit(count: int, concurrency: int, parts: int) -> None:
    whole = load(count, concurrency)
    shares = [whole.share(index, parts) for index in range(parts)]
    assert sorted(number for share in shares for number, _ in share.prompts) == list(range(count))
    assert sum(share.in_flight for share in shares) <= concurrency
    for share in shares:
        assert (share.in_flight > 0) == bool(share.prompts)  # none has requests that it may not send
        assert share.in_flight <= max(1, len(share.prompts))
    sizes = [len(share.prompts) for share in shares if share.prompts]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_requests_are_dealt_in_turn() -> None:
    assert [number for number, _ in load(7, 7).share(1, 3).prompts] == [1, 4]


def test_all_at_once_where_concurrency_is_not_limited() -> None:
    assert load(5, 0).in_flight == load(5, -1).in_flight == load(5, 5).in_flight == load(5, 9).in_flight == 5
    assert load(5, 4).in_flight == 4


def test_who_records() -> None:
    assert [seat_of(rank, tp=4, attention_dp=False) for rank in (0, 1, 4)] == [
        Seat(0, 1, True),
        Seat(0, 1, False),
        Seat(0, 1, False),
    ]
    assert [seat_of(rank, tp=4, attention_dp=True) for rank in (0, 3, 5)] == [
        Seat(0, 4, True),
        Seat(3, 4, True),
        Seat(1, 4, False),  # the second stage of a pipeline
    ]


def warmed(**changes) -> list[tuple[int, int]]:
    """Input and output tokens of a warm-up of requests of 100 + 500 tokens, 32 of which are in flight."""
    asked = {"mode": "max_throughput", "use_case": "chat", "isl": 100, "osl": 500, "num_requests": 64}
    asked |= {"max_batch_size": 16, "concurrency": 32, "max_num_tokens": 400, "kv_fraction": 0.5}
    cache_tokens, parts = changes.pop("cache_tokens", 10**6), changes.pop("parts", 1)
    load = load_of([Prompt([number] * 100, 500) for number in range(64)], 32).share(0, parts)
    warmup = warmup_load(Inference(**asked | changes), load, parts, cache_tokens, Draw(0, Terms(1000)))
    assert len(warmup.prompts) == 0 or warmup.in_flight == min(len(warmup.prompts), load.in_flight)
    return [(len(prompt.tokens), prompt.output_tokens) for _, prompt in warmup.prompts]


def test_a_warm_up_is_what_is_computed_at_once() -> None:
    assert warmed() == [(100, 4 + SETTLED)] * 16  # the batch, of whose prompts a step takes four
    assert len(warmed(max_batch_size=100)) == 32  # what is in flight
    assert len(warmed(cache_tokens=6000)) == 10  # what the cache holds
    assert len(warmed(cache_tokens=1)) == 1
    assert len(warmed(parts=4)) == 8  # a driver's share of what is in flight
    assert warmed(max_num_tokens=1) == [(100, 500)] * 16  # never longer than what is measured


def test_the_number_of_a_warm_up_can_be_given() -> None:
    assert warmed(warmup_requests=0) == []
    assert len(warmed(warmup_requests=70)) == 70
    assert len(warmed(warmup_requests=9, parts=4)) == 3
