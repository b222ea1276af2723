from hypothesis import given
from hypothesis import strategies as st

from llmb.serve.admission import Outlook
from llmb.serve.request import Request, Sequence


def sequence(length: int, left: int, **request) -> Sequence:
    return Sequence(request=Request(number=0, prompt=[1] * length, max_tokens=left, **request), tokens=[1] * length)


def peak(lengths: list[tuple[int, int]]) -> int:
    """The most tokens there are at once if each grows by one a step until it ends, counted step by step."""
    last = max(left for _, left in lengths)
    return max(sum(length + step for length, left in lengths if left >= step) for step in range(last + 1))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=2, max_size=8), st.integers(1, 300))
def test_it_admits_exactly_what_will_fit(lengths, blocks):
    """With blocks of one token nothing is rounded, so the estimate is exact."""
    outlook = Outlook([sequence(*lengths[0])], blocks, block_tokens=1)
    admitted = lengths[:1]
    for candidate in lengths[1:]:
        fits = peak([*admitted, candidate]) <= blocks
        assert outlook.admits(sequence(*candidate)) == fits
        if fits:
            admitted.append(candidate)


def test_alone_anything_is_admitted():
    assert Outlook([], 1, block_tokens=4).admits(sequence(100, 100))


def test_an_uncertain_end_reserves_one_block():
    """A limit of 1,000 tokens that an end-of-sequence token will probably cut short does not keep others out."""
    running = [sequence(10, 1000, eos=frozenset({2}))]
    assert Outlook(running, 10, block_tokens=8).admits(sequence(10, 1000, eos=frozenset({2})))
    assert not Outlook(running, 10, block_tokens=8).admits(sequence(10, 1000))


def test_shared_blocks_count_once():
    running, candidate = [sequence(40, 8)], sequence(40, 8)
    assert not Outlook(running, 10, block_tokens=8).admits(candidate)
    candidate.shared = 4
    assert Outlook(running, 10, block_tokens=8).admits(candidate)
