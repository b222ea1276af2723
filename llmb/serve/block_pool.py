"""Who holds which block of the paged cache, and which blocks begin a prompt that comes again.

A block is held by as many sequences as share it and free when none does. A free block keeps what is in it: with the
prefix cache on, full blocks have a name, and one whose name is asked for again is taken back instead of computed anew,
until it is given away for something else (the one that was free longest first, nameless ones before all).

A name is a SHA-256 over the block's tokens and the name of the block before it, so equal names mean equal prefixes.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from hashlib import sha256


def name_blocks(digests: list[bytes], tokens: Tokens[int], block_tokens: int, count: int) -> None:
    """Extend the names of a sequence's blocks to its first `count`, which must be full."""
    for index in range(len(digests), count):
        content = array("q", tokens[index * block_tokens : (index + 1) * block_tokens])
        before = digests[-1] if digests else b""
        digests.append(sha256(before + content.tobytes()).digest())


class BlockPool:
    """All blocks of the cache: `blocks` of them with room for `block_tokens` each."""

    def __init__(self, blocks: int, block_tokens: int, prefix_cache: bool):
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self._holders = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # the next to be given away first
        self._block_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens of one sequence fill or begin."""
        return -(-tokens // self.block_tokens)

    def take(self) -> int:
        """A block of one's own; there must be a free one."""
        block, _ = self._free.popitem(last=False)
        name = self._name_of[block]
        if name is not None:
            del self._block_of[name]
            self._name_of[block] = None
        self._holders[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        """One holder less for each. The last are freed first: the beginning of a prompt is worth keeping longest."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._name_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of these names, as far as all are known."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def revived(self, blocks: list[int]) -> int:
        """How many of these blocks nobody holds: so many fewer would be free if they were shared."""
        return sum(self._holders[block] == 0 for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def remember(self, block: int, digest: bytes) -> None:
        """From now on this full block can be found by its name, unless another of equal contents already is."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._name_of[block] = digest

    def check(self) -> None:
        """Raise if the books do not balance; for tests."""
        assert all((count == 0) == (block in self._free) for block, count in enumerate(self._holders)), "free or held"
        assert min(self._holders) >= 0, "a block was released more often than held"
        named = {name: block for block, name in enumerate(self._name_of) if name is not None}
        assert named == self._block_of, "names and blocks disagree"
