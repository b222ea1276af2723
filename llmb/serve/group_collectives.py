"""Groups of ranks in which something travels, by torch.distributed: NCCL between GPUs, gloo between CPUs.

Every rank of a group makes the same calls in the same order; what they decide that by, the plans of steps and the
numbers of tokens, is known to the host, so that no call waits for a device.

Shapes: N tokens of this rank or of all, R ranks, M the most tokens of any, C hidden width, S sequences that sample.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.serve.rank_groups import ExpertGroup, Group, Stage, Travelling

# torch 2.13 gave them these names and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def least_of_all(number: int, device: torch.device) -> int:
    """The smallest of all ranks' numbers, on every one of them."""
    if not dist.is_initialized():
        return number
    least = torch.tensor([number], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least.item())


@dataclass(frozen=True, kw_only=True)
class TensorGroup(Group):
    """Ranks that compute the same tokens, each with a part of the weights."""

    process_group: dist.ProcessGroup

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.process_group)
        return x

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        all_R = x.new_empty(self.size, *x.shape)
        if x.numel():
            _all_gather(all_R.flatten(0, 1), x.contiguous(), group=self.process_group)
        return torch.cat(all_R.unbind(), dim=dim)

    def agree(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x, src=dist.get_global_rank(self.process_group, 0), group=self.process_group)
        return x


@dataclass(frozen=True, kw_only=True)
class TensorExperts(ExpertGroup):
    """Experts of ranks that all have the same tokens."""

    process_group: dist.ProcessGroup

    def collect(self, partial_NC: Tensor) -> Tensor:
        dist.all_reduce(partial_NC, group=self.process_group)
        return partial_NC


@dataclass(frozen=True, kw_only=True)
class SpreadExperts(ExpertGroup):
    """Experts of ranks that have tokens of their own: each sees everybody's.

    Tokens travel padded to the most that any rank has, as the exchanges want equal parts; the experts never see the
    padding. `control` is the same ranks' way to exchange numbers between hosts.
    """

    process_group: dist.ProcessGroup
    control: dist.ProcessGroup
    counts: list[int] = field(default_factory=list)  # tokens of each rank in this step

    def any_busy(self, busy: bool) -> bool:
        """Whether any of the ranks has work; what the engine's lockstep asks."""
        answer = torch.tensor([int(busy)])
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.control)
        return bool(answer.item())

    def begin(self, tokens: int) -> bool:
        counts = torch.empty(self.control.size(), dtype=torch.int64)
        _all_gather(counts, torch.tensor([tokens]), group=self.control)
        self.counts[:] = counts.tolist()
        return any(self.counts)

    def spread(self, x_NC: Tensor) -> Tensor:
        own, most = self._own, max(self.counts)
        mine_MC = x_NC.contiguous()
        if own < most:
            mine_MC = x_NC.new_zeros(most, x_NC.shape[1])
            mine_MC[:own] = x_NC[:own]
        all_NC = x_NC.new_empty(len(self.counts) * most, x_NC.shape[1])
        _all_gather(all_NC, mine_MC, group=self.process_group)
        if min(self.counts) == most:
            return all_NC
        parts = zip(all_NC.split(most), self.counts, strict=True)
        return torch.cat([part_MC[:count] for part_MC, count in parts])

    def collect(self, partial_NC: Tensor) -> Tensor:
        most, width = max(self.counts), partial_NC.shape[1]
        if min(self.counts) < most:
            padded_NC = partial_NC.new_zeros(len(self.counts) * most, width)
            for part_MC, given_NC in zip(padded_NC.split(most), partial_NC.split(self.counts), strict=True):
                part_MC[: len(given_NC)] = given_NC
            partial_NC = padded_NC
        mine_MC = partial_NC.new_empty(most, width)
        _reduce_scatter(mine_MC, partial_NC.contiguous(), group=self.process_group)
        return mine_MC[: max(self._own, 1)]

    @property
    def _own(self) -> int:
        return self.counts[self.process_group.rank()]


@dataclass(frozen=True, kw_only=True)
class LinkedStage(Stage):
    """A stage with others before or behind it. The process group is all stages' ranks of this rank's place in them."""

    process_group: dist.ProcessGroup

    def receive(self, x_NC: Tensor) -> Tensor:
        dist.recv(x_NC, src=self._rank_of(self.index - 1), group=self.process_group)
        return x_NC

    def send(self, x_NC: Tensor) -> Travelling | None:
        return dist.isend(x_NC.contiguous(), dst=self._rank_of(self.index + 1), group=self.process_group)

    def share(self, tokens_S: Tensor) -> Travelling | None:
        last = self._rank_of(self.size - 1)
        return dist.broadcast(tokens_S, src=last, group=self.process_group, async_op=True)

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.process_group, stage)
