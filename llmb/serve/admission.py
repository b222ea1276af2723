"""Whether the cache will hold the running sequences when they have grown: admitting more only to preempt them later
means computing them twice.

Each sequence grows by a token a step until it ends and gives its blocks back. Of those sorted by the steps they have
left, the most first, exactly the first i + 1 are there when the i-th ends; the largest of these sums is the peak. Where
the end is not known (a token may stop it), one more block is all that is reserved. An estimate: a sequence that finds
no block after all is preempted, so a wrong one costs time only.

Shapes: S running sequences, most steps left first.
"""

from collections.abc import Iterable

import numpy as np

from llmb.serve.request import Sequence
from llmb.serve.stop_criteria import certain


class Outlook:
    """The future of those that run, to be asked about one candidate after another."""

    def __init__(self, sequences: Iterable[Sequence], blocks: int, block_tokens: int):
        self._capacity = blocks * block_tokens
        self._block_tokens = block_tokens
        future = sorted((self._future(sequence) for sequence in sequences), reverse=True)
        self._left_S = np.array([left for left, _ in future], dtype=np.int64)
        self._held_S = np.array([held for _, held in future], dtype=np.int64)

    def admits(self, sequence: Sequence) -> bool:
        """Whether there is room for this one too; if so it counts from now on. Alone, any sequence is admitted."""
        left, held = self._future(sequence)
        place = int(np.searchsorted(-self._left_S, -left))
        left_S = np.insert(self._left_S, place, left)
        held_S = np.insert(self._held_S, place, held)
        peak = int(np.max(np.cumsum(held_S) + left_S * np.arange(1, len(left_S) + 1)))
        if peak > self._capacity and len(left_S) > 1:
            return False
        self._left_S, self._held_S = left_S, held_S
        return True

    def _future(self, sequence: Sequence) -> tuple[int, int]:
        """Steps it has left, and tokens it holds: its last block is half empty on average."""
        request = sequence.request
        left = request.max_tokens - sequence.generated
        if not certain(request):
            left = min(left, self._block_tokens)
        return left, sequence.length - sequence.shared * self._block_tokens + self._block_tokens // 2
