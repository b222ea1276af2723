"""Which of a step's tokens belong to which sequence, and where that sequence lies in a paged cache.

Shapes: N tokens, P sequences, M blocks of the longest sequence.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Spans:
    """A step as kernels see it. Sequences with one token come first. Padding has no tokens, or a length of 0."""

    starts_P1: Tensor  # int32: where each part's tokens begin among the N; the last is N
    lengths_P: Tensor  # int32: tokens of the sequence once this step is done: what its newest token attends to
    table_PM: Tensor  # int32: its blocks, in order; what is beyond them is never read
    decodes: int  # the first so many parts have one token each
    longest_part: int  # tokens of the longest part
    longest: int  # at least the largest of lengths_P
    parts: tuple[tuple[int, int], ...] = ()  # (first position, tokens) of the parts after those, known to the host
