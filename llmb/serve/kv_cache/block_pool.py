"""Block pool of the paged KV cache, with reference counts and a prefix cache.

A block is referenced by every sequence that shares it and free when none does. A free block keeps its contents: with
the prefix cache on, full blocks have a hash, and a block whose hash is looked up again is reused instead of recomputed,
until it is evicted (least recently freed first, blocks without a hash before all others).

A hash is a SHA-256 over the block's tokens and the hash of the block before it, so equal hashes mean equal prefixes.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from hashlib import sha256


def extend_block_hashes(hashes: list[bytes], token_ids: Tokens[int], block_tokens: int, num_blocks: int) -> None:
    """Extend the hashes of a sequence's blocks to its first `num_blocks`, which must be full."""
    for index in range(len(hashes), num_blocks):
        content = array("q", token_ids[index * block_tokens : (index + 1) * block_tokens])
        parent = hashes[-1] if hashes else b""
        hashes.append(sha256(parent + content.tobytes()).digest())


class BlockPool:
    """All `num_blocks` blocks of the KV cache, of `block_tokens` tokens each."""

    def __init__(self, num_blocks: int, block_tokens: int, prefix_cache: bool):
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in order of eviction
        self._cached: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without a reference."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens needs."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self) -> int:
        """Take a free block, of which there must be one, and evict its contents."""
        block, _ = self._free.popitem(last=False)
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block] = None
        self._ref_counts[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each block, last first: the beginning of a prompt should be evicted last."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def find_cached(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of these hashes, up to the first miss."""
        blocks = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_free(self, blocks: list[int]) -> int:
        """Count the blocks without a reference: taking a reference to them leaves so many fewer free."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def add_reference(self, blocks: list[int]) -> None:
        """Take one more reference to each block."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable by its hash, unless another block with the same contents already is."""
        if block_hash not in self._cached:
            self._cached[block_hash] = block
            self._hashes[block] = block_hash

    def check_consistency(self) -> None:
        """Raise if the internal tables disagree; for tests."""
        assert all((count == 0) == (block in self._free) for block, count in enumerate(self._ref_counts)), "free list"
        assert min(self._ref_counts) >= 0, "a block was released more often than referenced"
        cached = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert cached == self._cached, "hashes and blocks disagree"
