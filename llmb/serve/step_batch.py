"""One step of the engine: a Plan says which tokens of which sequences are computed, Inputs is the same as tensors.

A step mixes sequences that generate (one token each) with chunks of prompts. Those with one token come first, so that
one kernel can take them and another the chunks; a step with nothing else may be the replay of a CUDA graph.

Shapes: N tokens, P parts, D half of the rotated width.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from llmb.ops.attention.attention_metadata import Spans
from llmb.serve.request import Sequence


@dataclass(slots=True, eq=False)  # not frozen: thousands are made each step, and a frozen one takes three times as long
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
    def decodes(self) -> int:
        """How many parts of one token lead."""
        return next((place for place, part in enumerate(self.parts) if part.count > 1), len(self.parts))

    @property
    def generates(self) -> bool:
        """Whether each part is one token that gives the next."""
        return all(part.samples and part.count == 1 for part in self.parts)

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


@dataclass(frozen=True, kw_only=True)
class Inputs(Spans):
    """A plan as the layers see it."""

    positions_N: Tensor  # int64, of each token in its sequence
    places_N: Tensor  # int64, where its key and value go in the cache: block * block_tokens + offset; -1: nowhere
    slots_P: Tensor  # int64, whose row of per-sequence state
    cos_ND: Tensor | None = None  # fp32, of the positions' angles; none: the model has no rotary positions
    sin_ND: Tensor | None = None
