"""Who shares the work of a step with whom. One process has groups of one, in which nothing travels."""

from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class ExpertGroup(Group):
    """Ranks that have the experts between them, part `index` of `size` each, or parts of every expert's width too.

    Where ranks share all tokens nothing travels before the experts, and their sums are added up after them. Where each
    rank has tokens of its own (attention data parallelism), every rank's tokens travel to all, and the sums back.
    """

    width: Group = Group()  # ranks that have the same experts, each a part of their width

    def spread(self, x_NC: Tensor) -> Tensor:
        """The tokens that this rank's experts must look at."""
        return x_NC

    def collect(self, partial_NC: Tensor) -> Tensor:
        """This rank's own tokens, with what all experts gave them added up."""
        return partial_NC


ALONE = Group()


@dataclass(frozen=True)
class Ranks:
    """This rank's groups. Weights of attention and dense layers are cut over `dense`, experts over `experts`."""

    device: torch.device
    dense: Group = ALONE
    experts: ExpertGroup = field(default_factory=ExpertGroup)
