"""One step of the engine: a Plan says which tokens of which sequences are computed, Inputs is the same as tensors.

A step mixes sequences that generate (one token each) with chunks of prompts. Those with one token come first, so that
one kernel can take them and another the chunks; a step with nothing else may be the replay of a CUDA graph.

Shapes: N tokens, P parts, S parts that sample, M blocks of the longest sequence.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from llmb.infer.request import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's tokens of this step: positions start to start + count."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the last of them is the sequence's newest, so the step gives it one more

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Plan:
    """What the device computes next; an empty one is a step that only keeps company (other ranks have work)."""

    parts: list[Part] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def sampling(self) -> list[Part]:
        """The parts that a token comes out of, in the order in which they come."""
        return [part for part in self.parts if part.samples]


class Launched(Protocol):
    """A step that the device may still be computing."""

    def tokens(self) -> list[int]:
        """What was sampled, one for each of `plan.sampling`; waits for the device."""
        ...


class Runner(Protocol):
    """Whatever computes steps. They are computed in the order in which they are launched."""

    def launch(self, plan: Plan) -> Launched:
        """Begin the step; a sequence's unread token, if it has one, is taken from where the device keeps it."""
        ...


@dataclass(frozen=True)
class Inputs:
    """A plan as the layers see it. Integers are int32 except where torch's indexing wants int64."""

    positions_N: Tensor  # int64, of each token in its sequence
    places_N: Tensor  # int64, where its key and value go in the cache: block * block_tokens + offset; -1: nowhere
    slots_P: Tensor  # int64, whose row of per-sequence state
    starts_P1: Tensor  # where each part's tokens begin among the N; the last is N
    lengths_P: Tensor  # tokens of the sequence once this step is done: what its newest token attends to
    table_PM: Tensor  # its blocks, in order; what is beyond them is never read
    decodes: int  # the first so many parts have one token each
    longest_part: int  # tokens of the longest part
    longest: int  # at least the largest of lengths_P
    parts: tuple[tuple[int, int], ...] = ()  # (start, count) of the parts after the decodes, known to the host
