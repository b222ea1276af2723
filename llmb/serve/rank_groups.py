"""Who shares the work of a step with whom. One process has groups of one, in which nothing travels.

`group_collectives.py` has the groups in which something does, `serve_layout.py` says who is in which.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Some of the ranks, and which of them this one is."""

    index: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the group, on every rank of it; may write into x."""
        return x

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Everybody's x, one after the other along a dimension."""
        return x

    def agree(self, x: Tensor) -> Tensor:
        """The first one's x, for what each has computed but rounding may have made different; may write into x."""
        return x


@dataclass(frozen=True)
class ExpertGroup(Group):
    """Ranks that have the experts between them, part `index` of `size` each, or parts of every expert's width too.

    Where ranks share all tokens nothing travels before the experts, and their sums are added up after them. Where each
    rank has tokens of its own (attention data parallelism), every rank's tokens travel to all, and the sums back.
    """

    width: Group = Group()  # ranks that have the same experts, each a part of their width

    def begin(self, tokens: int) -> bool:
        """A step begins, with so many tokens of this rank's own: whether there are any to compute, here or elsewhere.

        A rank that has none while others do takes part with one row of padding.
        """
        return tokens > 0

    def spread(self, x_NC: Tensor) -> Tensor:
        """The tokens that this rank's experts must look at."""
        return x_NC

    def collect(self, partial_NC: Tensor) -> Tensor:
        """This rank's own tokens, with what all experts gave them added up."""
        return partial_NC


class Travelling(Protocol):
    """Something on its way, to be kept until it has been waited for."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class Stage:
    """Which part of the pipeline this rank is: some layers, the embedding with the first, the head with the last."""

    index: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.size - 1

    def receive(self, x_NC: Tensor) -> Tensor:
        """The stream as the stage before gave it, written into this tensor."""
        return x_NC

    def send(self, x_NC: Tensor) -> "Travelling | None":
        """The stream begins to travel to the next stage."""
        return None

    def share(self, tokens_S: Tensor) -> "Travelling | None":
        """What the last stage has chosen begins to travel to all others, into this tensor there."""
        return None


ALONE = Group()


@dataclass(frozen=True)
class Ranks:
    """This rank's groups. Weights of attention and dense layers are cut over `dense`, experts over `experts`."""

    device: torch.device
    dense: Group = ALONE
    experts: ExpertGroup = field(default_factory=ExpertGroup)
    stage: Stage = Stage()
    world: int = 1  # all ranks of the run
