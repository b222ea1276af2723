"""Blocks of full and of windowed layers, against counts by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.perfmodel.serving_time.cache_blocks import CacheBlocks, sequence_window_blocks, split_blocks, window_blocks


@pytest.mark.parametrize(("window", "block_tokens"), [(1, 4), (2, 4), (4, 4), (5, 4), (6, 4), (128, 64), (3, 1)])
def test_a_decoding_sequence_sees_tokens_of_so_many_blocks(window: int, block_tokens: int) -> None:
    positions = range(1000, 1000 + 2 * block_tokens)
    spans = [at // block_tokens - (at - window + 1) // block_tokens + 1 for at in positions]
    assert max(spans) == sequence_window_blocks(window, block_tokens)


def test_windows_of_gpt_oss() -> None:
    sizes = {"block_tokens": 64, "max_batch_size": 512, "max_num_tokens": 8192}
    assert window_blocks(window=128, max_seq_len=9216, **sizes) == 512 * 4 + 128
    assert window_blocks(window=128, max_seq_len=256, **sizes) == 0, "no sequence would free a block"
    assert window_blocks(window=None, max_seq_len=9216, **sizes) == 0


def test_memory_is_split_between_the_groups() -> None:
    assert split_blocks(1000, 10, 0, 0, 50) == CacheBlocks(100)
    assert split_blocks(1000, 10, 10, 0, 50) == CacheBlocks(50)
    assert split_blocks(1000, 10, 10, 20, 99) == CacheBlocks(80, 20)
    assert split_blocks(1000, 10, 10, 60, 99) == CacheBlocks(50, 50), "windows of a full batch would take more"
    assert split_blocks(1000, 0, 10, 20, 99) == CacheBlocks(99, 20), "every layer has a window"


@given(st.integers(0, 10**6), st.integers(0, 50), st.integers(0, 50), st.integers(0, 3000), st.integers(1, 500))
def test_a_window_group_never_costs_blocks(cache: int, full: int, window: int, windows: int, batch: int) -> None:
    if full + window == 0:
        return
    blocks, equal = split_blocks(cache, full, window, windows, batch), cache // (full + window)
    if windows == 0:
        assert blocks == CacheBlocks(equal)
        return
    assert blocks.full * full + blocks.window * window <= cache
    assert blocks.full >= min(equal, batch)
    assert blocks.window == windows or blocks.window >= blocks.full, "it would run out before the other"
