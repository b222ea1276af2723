"""Groups of ranks that share the work of a step. A single process has groups of one rank, without communication.

`group_collectives.py` has the groups that communicate, `serve_layout.py` decides which rank is in which.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks, and the index of this rank in it."""

    index: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the group; may write into x."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' x along a dimension."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x, for results that rounding may have made different; may write into x."""
        return x


@dataclass(frozen=True)
class ExpertGroup(RankGroup):
    """Ranks that share the experts: shard `index` of `size`, and optionally a slice of each expert's width.

    Where all ranks have the same tokens nothing is sent before the experts, and their outputs are all-reduced. Where
    each rank has its own tokens (attention data parallelism), tokens are all-gathered and outputs reduce-scattered.
    """

    tp: RankGroup = RankGroup()  # ranks that have the same experts, each a slice of their width

    def begin_step(self, num_tokens: int) -> bool:
        """Announce the tokens of this rank in a step, and return whether any rank has tokens.

        A rank that has none while others do takes part with one row of padding.
        """
        return num_tokens > 0

    def dispatch(self, x_NC: Tensor) -> Tensor:
        """Return the tokens that this rank's experts must process."""
        return x_NC

    def combine(self, partial_NC: Tensor) -> Tensor:
        """Return this rank's own tokens, with the outputs of all experts summed."""
        return partial_NC


class PendingTransfer(Protocol):
    """An asynchronous transfer; its tensor must be kept until `wait` returns."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class StageGroup:
    """This rank's pipeline stage: some layers, the embedding with the first, the head with the last."""

    index: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def receive(self, x_NC: Tensor) -> Tensor:
        """Receive the residual of the previous stage into this tensor."""
        return x_NC

    def send(self, x_NC: Tensor) -> "PendingTransfer | None":
        """Start sending the residual to the next stage."""
        return None

    def broadcast_tokens(self, tokens_S: Tensor) -> "PendingTransfer | None":
        """Start the broadcast of the last stage's sampled tokens, into this tensor on the other stages."""
        return None


SINGLE_RANK = RankGroup()


@dataclass(frozen=True)
class RankGroups:
    """This rank's groups. Attention and dense layers are sharded over `tp`, experts over `experts`."""

    device: torch.device
    tp: RankGroup = SINGLE_RANK
    experts: ExpertGroup = field(default_factory=ExpertGroup)
    stage: StageGroup = StageGroup()
    world_size: int = 1
