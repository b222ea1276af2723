"""Groups of ranks that communicate by torch.distributed: NCCL between GPUs, gloo between CPUs.

Every rank of a group makes the same calls in the same order. The batches and token counts that decide them are known to
the host, so that no call waits for a device.

Shapes: N tokens of this rank or of all, R ranks, M largest token count of a rank, C hidden size, S sampling sequences.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.runtime.flat_collectives import all_gather_flat, reduce_scatter_flat
from llmb.serve.rank_groups import ExpertGroup, PendingTransfer, RankGroup, StageGroup


def min_over_ranks(number: int, device: torch.device) -> int:
    """Return the smallest of all ranks' numbers on every rank."""
    if not dist.is_initialized():
        return number
    smallest = torch.tensor([number], device=device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest.item())


@dataclass(frozen=True, kw_only=True)
class TensorParallelGroup(RankGroup):
    """Ranks that compute the same tokens, each with a shard of the weights."""

    process_group: dist.ProcessGroup

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        all_R = x.new_empty(self.size, *x.shape)
        if x.numel():
            all_gather_flat(all_R.flatten(0, 1), x.contiguous(), group=self.process_group)
        return torch.cat(all_R.unbind(), dim=dim)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x, src=dist.get_global_rank(self.process_group, 0), group=self.process_group)
        return x


@dataclass(frozen=True, kw_only=True)
class TensorParallelExperts(ExpertGroup):
    """Expert shards of ranks that all have the same tokens."""

    process_group: dist.ProcessGroup

    def combine(self, partial_NC: Tensor) -> Tensor:
        dist.all_reduce(partial_NC, group=self.process_group)
        return partial_NC


@dataclass(frozen=True, kw_only=True)
class DataParallelExperts(ExpertGroup):
    """Expert shards of ranks that have their own tokens: each rank processes all ranks' tokens.

    Tokens are padded to the largest count of any rank, as the collectives need equal sizes; the experts never see the
    padding. `control` is a gloo group of the same ranks for numbers on the host.
    """

    process_group: dist.ProcessGroup
    control: dist.ProcessGroup
    counts: list[int] = field(default_factory=list)  # tokens of each rank in this step

    def any_busy(self, busy: bool) -> bool:
        """Return whether any of the ranks has work; the engine's `lockstep`."""
        any_rank = torch.tensor([int(busy)])
        dist.all_reduce(any_rank, dist.ReduceOp.MAX, group=self.control)
        return bool(any_rank.item())

    def begin_step(self, num_tokens: int) -> bool:
        counts = torch.empty(self.control.size(), dtype=torch.int64)
        all_gather_flat(counts, torch.tensor([num_tokens]), group=self.control)
        self.counts[:] = counts.tolist()
        return any(self.counts)

    def dispatch(self, x_NC: Tensor) -> Tensor:
        count, max_count = self._local_count, max(self.counts)
        local_MC = x_NC.contiguous()
        if count < max_count:
            local_MC = x_NC.new_zeros(max_count, x_NC.shape[1])
            local_MC[:count] = x_NC[:count]
        all_NC = x_NC.new_empty(len(self.counts) * max_count, x_NC.shape[1])
        all_gather_flat(all_NC, local_MC, group=self.process_group)
        if min(self.counts) == max_count:
            return all_NC
        per_rank = zip(all_NC.split(max_count), self.counts, strict=True)
        return torch.cat([rank_MC[:rank_count] for rank_MC, rank_count in per_rank])

    def combine(self, partial_NC: Tensor) -> Tensor:
        max_count, hidden = max(self.counts), partial_NC.shape[1]
        if min(self.counts) < max_count:
            padded_NC = partial_NC.new_zeros(len(self.counts) * max_count, hidden)
            for padded_MC, rank_NC in zip(padded_NC.split(max_count), partial_NC.split(self.counts), strict=True):
                padded_MC[: len(rank_NC)] = rank_NC
            partial_NC = padded_NC
        local_MC = partial_NC.new_empty(max_count, hidden)
        reduce_scatter_flat(local_MC, partial_NC.contiguous(), group=self.process_group)
        return local_MC[: max(self._local_count, 1)]

    @property
    def _local_count(self) -> int:
        return self.counts[self.process_group.rank()]


@dataclass(frozen=True, kw_only=True)
class DistributedStageGroup(StageGroup):
    """A pipeline stage with neighbors. The process group has the ranks of all stages at this rank's index in them."""

    process_group: dist.ProcessGroup

    def receive(self, x_NC: Tensor) -> Tensor:
        dist.recv(x_NC, src=self._global_rank(self.index - 1), group=self.process_group)
        return x_NC

    def send(self, x_NC: Tensor) -> PendingTransfer | None:
        return dist.isend(x_NC.contiguous(), dst=self._global_rank(self.index + 1), group=self.process_group)

    def broadcast_tokens(self, tokens_S: Tensor) -> PendingTransfer | None:
        last = self._global_rank(self.size - 1)
        return dist.broadcast(tokens_S, src=last, group=self.process_group, async_op=True)

    def _global_rank(self, stage: int) -> int:
        return dist.get_global_rank(self.process_group, stage)
