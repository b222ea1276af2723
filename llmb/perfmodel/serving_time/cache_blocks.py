"""Blocks of the native engine's KV cache: a group of layers with full attention and one with a sliding window.

    windows = window_blocks(window=128, block_tokens=64, max_seq_len=9216, max_batch_size=512, max_num_tokens=8192)
    split_blocks(cache_bytes, full_bytes, window_bytes, windows, full_batch)

A sequence keeps the blocks of the window group that a next token can still see, and frees the others. The group gets as
many blocks as a full batch can ever hold, so that it never runs out; but no more than if both groups had equally many.
In either case a free block of the full group implies one of the window group, which therefore is never a reason to wait
or to preempt, and no cache holds fewer tokens than one without the second group.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheBlocks:
    """Numbers of blocks of a KV cache; no window blocks: windowed layers keep whole sequences, like all others."""

    full: int
    window: int = 0


def sequence_window_blocks(window: int, block_tokens: int) -> int:
    """Return the most blocks that a decoding sequence holds: its window ends and begins inside of a block."""
    return -(-(window - 1) // block_tokens) + 1


def window_blocks(
    *, window: int | None, block_tokens: int, max_seq_len: int, max_batch_size: int, max_num_tokens: int
) -> int:
    """Return the most window blocks that a full batch holds at once; 0 if no sequence would ever free one.

    The prefill chunks of a step are whole until the next step: max_num_tokens, and a last block of each.
    """
    if window is None:
        return 0
    held = sequence_window_blocks(window, block_tokens) + 1
    if held >= -(-max_seq_len // block_tokens):
        return 0
    return max_batch_size * held + max_num_tokens // block_tokens


def split_blocks(
    cache_bytes: float, full_bytes: float, window_bytes: float, windows: int, full_batch: int
) -> CacheBlocks:
    """Return the blocks of a cache. `full_bytes`, `window_bytes`: of a block in all layers of the group.

    `windows`: from `window_blocks`; `full_batch`: blocks of a full batch of the longest sequences, which is the number
    where blocks need no memory.
    """
    equal = int(cache_bytes // (full_bytes + window_bytes)) if full_bytes + window_bytes else full_batch
    if windows == 0 or equal <= windows:
        return CacheBlocks(full=equal, window=equal if windows else 0)
    full = int((cache_bytes - windows * window_bytes) // full_bytes) if full_bytes else full_batch
    return CacheBlocks(full=full, window=windows)
