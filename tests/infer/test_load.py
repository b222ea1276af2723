"""Who sends which requests, and how many are in flight."""

from hypothesis import given
from hypothesis import strategies as st

from llmb.infer.load import Load, Seat, load_of, seat_of
from llmb.infer.prompts import Prompt


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
