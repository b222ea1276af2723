"""AdamW and gradient clipping, on this rank's shards.

The update needs no communication; only the gradient norm is reduced over all ranks. Matrices are updated bucket by
bucket in one pass over memory, which reads and writes the fp32 weight exactly where it has low bits. State in bf16,
moments or weights without low bits, uses stochastic rounding (`llmb/ops/optim/adam.py`): an update is often smaller
than the spacing of bf16, and rounding to nearest would discard it every time. Replicated fp32 parameters are updated on
every rank alike, by torch's fused kernel.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.ops.gemm.weight_gradient import existing_gradient
from llmb.ops.optim.adam import adam_update
from llmb.ops.optim.fused_adamw import FusedAdamW
from llmb.runtime.adamw_settings import BETAS, EPS, WEIGHT_DECAY
from llmb.train.parallel.bucket import Bucket
from llmb.train.parallel.fsdp import ShardedParameters
from llmb.train.parallel.mesh import Mesh

MAX_GRAD_NORM = 1.0
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")  # those of torch.optim.AdamW


class Optimizer:
    """AdamW over the parameters of all model parts of this rank; weight decay for matrices only."""

    def __init__(
        self,
        parts: Sequence[ShardedParameters],
        mesh: Mesh,
        tied_copies: AbstractSet[str] = frozenset(),
        moments: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        self._parts, self._mesh, self._moments, self._seed = parts, mesh, moments, seed
        self.buckets = [bucket for part in parts for bucket in part.buckets]
        self._tied_copies = tied_copies  # weights whose gradients another pipeline rank counts in the norm
        self.replicated = {
            name: weight for part in parts for group in part.replicated for name, weight in group.parameters.items()
        }
        self.fused_adamw = FusedAdamW([*self.replicated.values()], BETAS, EPS, WEIGHT_DECAY)
        self.steps = 0  # number of updates so far
        self.bucket_moments: list[tuple[Tensor, ...]] = []

    @torch.no_grad()
    def update(self, lr: float, discard: Tensor | None = None) -> Tensor:
        """Clip the gradients, step and free them; return their norm before clipping, still on the device.

        Where `discard` is true, on the device, nothing changes but the number of updates, which `repeat` takes back.
        """
        self.init_bucket_moments()
        self.steps += 1
        norm = self._norm()
        # A factor that is not finite changes nothing, so that the cause can still be found.
        scale, finite = ((norm + 1e-6) / MAX_GRAD_NORM).clamp(min=1.0), norm.isfinite()
        if discard is not None:
            finite &= ~discard
        self.fused_adamw.step(lr, scale, finite.logical_not().float())
        factor = scale.reciprocal().where(finite, torch.nan)
        for number, (bucket, (m, v)) in enumerate(zip(self.buckets, self.bucket_moments, strict=True)):
            exact = bucket.low is not None or bucket.shard.dtype == torch.float32
            adam_update(
                bucket.shard, bucket.reduced_grad, m, v, bucket.low, lr=lr,
                beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, step=self.steps, factor=factor,
                rounding="nearest" if exact and self._moments == torch.float32 else "stochastic",
                seed=((self._seed << 24) + self.steps << 32) + (bucket.replicas.position << 16) + number,
            )  # fmt: skip
            bucket.invalidate()
        # These steps do not bump versions, and weights cached in other formats must be refreshed.
        torch.autograd.graph.increment_version([weight for bucket in self.buckets for weight in bucket.parameters])
        self.zero_grad()
        return norm

    def repeat(self) -> None:
        """Give the next update the number of the last one, which was discarded; the fused step did so itself."""
        self.steps -= 1

    def zero_grad(self) -> None:
        """Free the gradients."""
        for part in self._parts:
            part.zero_grad()

    def init_bucket_moments(self) -> None:
        """Allocate missing moments of buckets, as zeros."""
        if not self.bucket_moments:
            self.bucket_moments = [
                tuple(torch.zeros_like(bucket.shard, dtype=self._moments) for _ in MOMENT_NAMES)
                for bucket in self.buckets
            ]

    def init_state(self) -> None:
        """Allocate the AdamW state, to be loaded into."""
        self.init_bucket_moments()
        self.fused_adamw.init_state()

    def bucket_state(self) -> Iterator[tuple[Bucket, str, Tensor]]:
        """Yield each bucket's moments, by name."""
        for bucket, moments in zip(self.buckets, self.bucket_moments, strict=True):
            for name, moment in zip(MOMENT_NAMES, moments, strict=True):
                yield bucket, name, moment

    def replicated_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the state of each replicated parameter, by name."""
        for name, weight in self.replicated.items():
            for kind, tensor in self.fused_adamw.state.get(weight, {}).items():
                yield name, kind, tensor

    def _norm(self) -> Tensor:
        """Return the norm over all weights of the model.

        Shards are different on every rank; a replicated parameter is counted by the first rank that has it.
        """
        counted = [bucket.reduced_grad for bucket in self.buckets if self._tied_copies.isdisjoint(bucket.names)]
        for part in self._parts:
            for group in part.replicated:
                if group.replicas.position == 0:
                    counted += [existing_gradient(parameter) for parameter in group.parameters.values()]
        squares = torch.zeros((), device=self._mesh.device)
        if counted:
            squares += torch.stack(torch._foreach_norm(counted, dtype=torch.float32)).square().sum()
        if self._mesh.world_size > 1:
            dist.all_reduce(squares)
        return squares.sqrt()
