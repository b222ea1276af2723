import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.serve.kv_cache.block_pool import BlockPool, extend_block_hashes


def hashes_of(tokens, block_tokens=2):
    block_hashes = []
    extend_block_hashes(block_hashes, tokens, block_tokens, len(tokens) // block_tokens)
    return block_hashes


def test_allocate_and_release():
    pool = BlockPool(3, 2, prefix_cache=False)
    taken = [pool.allocate() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert (pool.num_used, pool.num_free) == (3, 0)
    pool.release(taken)
    assert (pool.num_used, pool.num_free) == (0, 3)
    pool.check_consistency()


def test_empty_pool_and_double_release_are_errors():
    pool = BlockPool(1, 2, prefix_cache=False)
    block = pool.allocate()
    with pytest.raises(KeyError):
        pool.allocate()
    pool.release([block])
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.check_consistency()


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_block_hashes_are_equal_iff_prefixes_are(first, second):
    for index, (a, b) in enumerate(zip(hashes_of(first), hashes_of(second), strict=False)):
        end = 2 * (index + 1)
        assert (a == b) == (first[:end] == second[:end])


def test_block_hashes_can_be_extended_incrementally():
    tokens = list(range(10))
    block_hashes = []
    for count in (1, 1, 3, 5):
        extend_block_hashes(block_hashes, tokens, 2, count)
    assert block_hashes == hashes_of(tokens)


def test_free_block_is_reused_until_evicted():
    pool = BlockPool(2, 2, prefix_cache=True)
    block = pool.allocate()
    (block_hash,) = hashes_of([5, 6])
    pool.cache_block(block, block_hash)
    pool.release([block])
    assert pool.find_cached([block_hash]) == [block]
    assert pool.count_free([block]) == 1
    pool.add_reference([block])
    assert pool.num_used == 1
    assert pool.count_free([block]) == 0
    pool.add_reference([block])
    pool.release([block])
    assert pool.num_used == 1
    pool.release([block])
    pool.allocate()
    assert pool.find_cached([block_hash]) == [block]  # the block without a hash was evicted first
    pool.allocate()
    assert pool.find_cached([block_hash]) == []
    pool.check_consistency()


def test_eviction_is_lru_and_from_the_end_of_a_sequence():
    pool = BlockPool(4, 2, prefix_cache=True)
    first, second = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    first_hashes, second_hashes = hashes_of([1, 2, 3, 4]), hashes_of([5, 6, 7, 8])
    for blocks, block_hashes in ((first, first_hashes), (second, second_hashes)):
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            pool.cache_block(block, block_hash)
    pool.release(second)
    pool.release(first)
    assert [pool.allocate() for _ in range(3)] == [second[1], second[0], first[1]]
    assert pool.find_cached(first_hashes) == first[:1]
    assert pool.find_cached(second_hashes) == []


def test_equal_contents_are_cached_once():
    pool = BlockPool(2, 2, prefix_cache=True)
    first, second = pool.allocate(), pool.allocate()
    (block_hash,) = hashes_of([1, 1])
    pool.cache_block(first, block_hash)
    pool.cache_block(second, block_hash)
    assert pool.find_cached([block_hash]) == [first]
    pool.release([first, second])
    assert pool.allocate() == second
    pool.check_consistency()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_num_blocks_for_tokens(tokens, blocks):
    assert BlockPool(9, 4, prefix_cache=False).num_blocks_for(tokens) == blocks
