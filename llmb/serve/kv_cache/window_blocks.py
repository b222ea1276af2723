"""Blocks that sequences hold in layers with a sliding window: those that a next token can still see.

    windows.extend(sequence)    before each chunk: free the blocks that its first token does not see, allocate its own
    windows.trim(sequence)      after a chunk was launched: free the blocks that the next token does not see

Index i of `Sequence.window_block_ids` has the tokens of index i of `block_ids`, so that one length describes both block
tables. Entries of freed blocks stay where they are: attention reads no block that lies wholly before the window.
A freed block can be written by the next step at once, since the device computes steps in launch order.
"""

from llmb.serve.kv_cache.block_pool import BlockPool
from llmb.serve.request import Sequence


class WindowBlocks:
    """The window group's pool. It has enough blocks whenever the full group's has (`perfmodel`'s `cache_blocks`)."""

    def __init__(self, num_blocks: int, block_tokens: int, window: int):
        self.pool = BlockPool(num_blocks, block_tokens, prefix_cache=False)
        self.window = window

    def extend(self, sequence: Sequence) -> None:
        """Allocate a window block for each block that the sequence got for its next chunk."""
        self.trim(sequence)
        for _ in range(len(sequence.block_ids) - len(sequence.window_block_ids)):
            sequence.window_block_ids.append(self.pool.allocate())

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks that no token from `num_computed_tokens` on sees."""
        oldest = max(0, sequence.num_computed_tokens - self.window + 1)
        first = min(oldest // self.pool.block_tokens, len(sequence.window_block_ids))
        if first > sequence.num_expired_blocks:
            self.pool.release(sequence.window_block_ids[sequence.num_expired_blocks : first])
            sequence.num_expired_blocks = first

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence."""
        self.pool.release(sequence.window_block_ids[sequence.num_expired_blocks :])
        sequence.window_block_ids, sequence.num_expired_blocks = [], 0
