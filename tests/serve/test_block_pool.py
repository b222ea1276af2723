import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.serve.block_pool import BlockPool, name_blocks


def names(tokens, block_tokens=2):
    digests = []
    name_blocks(digests, tokens, block_tokens, len(tokens) // block_tokens)
    return digests


def test_blocks_are_counted_and_come_back():
    pool = BlockPool(3, 2, prefix_cache=False)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert (pool.used, pool.free) == (3, 0)
    pool.release(taken)
    assert (pool.used, pool.free) == (0, 3)
    pool.check()


def test_taking_from_an_empty_pool_and_releasing_twice_are_errors():
    pool = BlockPool(1, 2, prefix_cache=False)
    block = pool.take()
    with pytest.raises(KeyError):
        pool.take()
    pool.release([block])
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.check()


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_names_are_equal_exactly_as_far_as_the_prefixes_are(one, other):
    for index, (a, b) in enumerate(zip(names(one), names(other), strict=False)):
        end = 2 * (index + 1)
        assert (a == b) == (one[:end] == other[:end])


def test_names_can_be_extended_piece_by_piece():
    tokens = list(range(10))
    digests = []
    for count in (1, 1, 3, 5):
        name_blocks(digests, tokens, 2, count)
    assert digests == names(tokens)


def test_a_freed_block_is_revived_until_it_is_given_away():
    pool = BlockPool(2, 2, prefix_cache=True)
    block = pool.take()
    (name,) = names([5, 6])
    pool.remember(block, name)
    pool.release([block])
    assert pool.find([name]) == [block]
    assert pool.revived([block]) == 1
    pool.share([block])
    assert pool.used == 1
    assert pool.revived([block]) == 0
    pool.share([block])
    pool.release([block])
    assert pool.used == 1
    pool.release([block])
    pool.take()
    assert pool.find([name]) == [block]  # the nameless one went first
    pool.take()
    assert pool.find([name]) == []
    pool.check()


def test_the_longest_unused_goes_first_and_of_one_sequence_the_end():
    pool = BlockPool(4, 2, prefix_cache=True)
    first, second = [pool.take(), pool.take()], [pool.take(), pool.take()]
    first_names, second_names = names([1, 2, 3, 4]), names([5, 6, 7, 8])
    for blocks, digests in ((first, first_names), (second, second_names)):
        for block, digest in zip(blocks, digests, strict=True):
            pool.remember(block, digest)
    pool.release(second)
    pool.release(first)
    assert [pool.take() for _ in range(3)] == [second[1], second[0], first[1]]
    assert pool.find(first_names) == first[:1]
    assert pool.find(second_names) == []


def test_equal_contents_are_remembered_once():
    pool = BlockPool(2, 2, prefix_cache=True)
    one, other = pool.take(), pool.take()
    (name,) = names([1, 1])
    pool.remember(one, name)
    pool.remember(other, name)
    assert pool.find([name]) == [one]
    pool.release([one, other])
    assert pool.take() == other
    pool.check()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for_tokens(tokens, blocks):
    assert BlockPool(9, 4, prefix_cache=False).blocks_for(tokens) == blocks
