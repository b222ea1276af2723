"""One rank built on the meta device, and the cost of a step of it.

Only micro-batches that differ are computed: the first, which allocates gradients, one from the middle, and the last,
which reduces them. The others cost the same as the middle one, and those of a pipeline are combined in the order of
torch's schedule. Optimizer state, cached fp8 weights and fp8 scales exist from the start, as they do from the second
step on.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmb.config.spec import RunConfig, Training
from llmb.models.architectures import Network
from llmb.ops.quant.delayed_scaling import DelayedScaling
from llmb.perfmodel.communication import CollectiveTraffic
from llmb.perfmodel.pipeline_schedule import MAX_PENDING_SENDS, rank_order
from llmb.train.dry_run.dispatch_watch import DispatchWatch
from llmb.train.dry_run.memory_tracker import ACTIVATIONS
from llmb.train.llama_layers import begin_step, quantize_weights
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.pipeline_stages import TIED, stage_boundary_tensor
from llmb.train.parallelize import allocate_weights, build_meta_parts, build_optimizer
from llmb.train.precision import fp8_grouped_linears

META = torch.device("meta")
WEIGHTS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"

BytesByPurpose = Counter[str]  # bytes by label


@dataclass(frozen=True)
class PassCost:
    """Cost of one forward or backward pass of a model part, relative to its start."""

    peak: BytesByPurpose  # above the memory before it
    change: BytesByPurpose  # of the memory held afterwards; may be negative
    flops: float
    calls: Counter[Any]
    bytes: Counter[Any]


@dataclass
class StepCost:
    """Cost of a step, accumulated over passes: memory held, peak memory, FLOPs and collectives."""

    held: BytesByPurpose
    peak: BytesByPurpose = field(default_factory=Counter)
    flops: float = 0.0
    calls: Counter[Any] = field(default_factory=Counter)
    bytes: Counter[Any] = field(default_factory=Counter)

    def add(self, cost: PassCost) -> None:
        """Add one more pass."""
        highest = Counter(self.held)
        highest.update(cost.peak)  # unlike +, keeps negative counts
        if highest.total() > self.peak.total():
            self.peak = highest
        self.held.update(cost.change)
        self.flops += cost.flops
        self.calls.update(cost.calls)
        self.bytes.update(cost.bytes)


class MetaRank:
    """One rank on the meta device, ready to compute."""

    def __init__(self, config: RunConfig, workload: Training, mesh: Mesh, watch: DispatchWatch):
        self._workload, self._mesh, self._watch = workload, mesh, watch
        self._memory = watch.memory
        self._pipelined = mesh.size("pp") > 1
        boundary = stage_boundary_tensor(config, workload, mesh)
        self._boundary = boundary.shape, boundary.dtype
        del boundary  # it would count as held
        self.model_parts = build_meta_parts(config, workload, mesh)
        for model_part in self.model_parts:
            sharded = allocate_weights(model_part, config, workload, mesh, META)
            if isinstance(scaling := model_part.fp8_scaling, DelayedScaling):
                scaling.scale_amax_of(*scaling.state_dict(), measure=lambda *_: None)
            quantize_weights(model_part)
            for experts in fp8_grouped_linears(model_part):
                experts.cache_weight()
            for bucket in sharded.buckets:
                bucket.invalidate()  # as the update before a step does
        self._memory.claim(WEIGHTS)
        self.optimizer = build_optimizer(self.model_parts, workload, mesh)
        self.optimizer.init_state()
        vars(self.optimizer.fused_adamw)["step"] = lambda *_: None  # in place, and not implemented on the meta device
        self._memory.claim(OPTIMIZER)

    @property
    def parameters(self) -> int:
        """Number of elements that the optimizer of this rank updates."""
        parts = map(sharded_parameters, self.model_parts)
        return sum(values.numel() for part in parts for _, values in part.own_values())

    def step(self) -> StepCost:
        """Return the cost of all micro-batches of a step and of the optimizer update."""
        ga, pp_rank = self._workload.ga, self._mesh.index("pp")
        step = StepCost(Counter(self._memory.now()))
        step.add(self._cost(self._begin_step))
        if self._pipelined and self._mesh.parallel.overlap_send:
            step.held[ACTIVATIONS] += MAX_PENDING_SENDS * self._boundary_bytes
        costs = [self._costs(model_part) for model_part in self.model_parts]
        for index, micro, forward in rank_order(self._mesh.size("pp"), self._mesh.parallel.vp, ga, pp_rank):
            step.add(costs[index][_kind(micro, ga), forward])
        step.add(self._cost(self._update))
        return step

    def _costs(self, model_part: Network) -> dict[tuple[str, bool], PassCost]:
        """Return the costs of each kind of micro-batch, forward and backward."""
        costs: dict[tuple[str, bool], PassCost] = {}
        count = min(self._workload.ga, 3)
        for micro in range(count):
            costs |= self._micro_batch_costs(model_part, _kind(micro, count))
        return costs

    def _micro_batch_costs(self, model_part: Network, kind: str) -> dict[tuple[str, bool], PassCost]:
        sharded = sharded_parameters(model_part)
        sharded.begin_backward(last=kind in ("last", "only"))
        tokens = torch.zeros(self._workload.mbs, self._workload.seqlen // self._mesh.size("cp"), dtype=torch.int64)
        self._memory.label(ACTIVATIONS, [tokens])
        held: list[Tensor] = []  # from the forward pass to the backward pass

        def forward() -> None:
            x = tokens if model_part.first else self._received(requires_grad=True)
            out = model_part(x, tokens if model_part.last else None)
            if not model_part.last:  # it is sent, and freed with the send
                out.data = out.new_empty(()).expand(out.shape)
            held.extend((x, out))
            self._memory.label(WEIGHTS, model_part.parameters())  # including those that stay gathered

        def backward() -> None:
            held.pop().backward(None if model_part.last else self._received())
            sharded.end_backward()
            if kind in ("last", "only"):
                sharded.end_step()
            held.clear()
            self._memory.claim(GRADIENTS)  # nothing else is left

        return {(kind, True): self._cost(forward), (kind, False): self._cost(backward)}

    def _received(self, requires_grad: bool = False) -> Tensor:
        """Return the residual between two stages, or its gradient."""
        shape, dtype = self._boundary
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)

    @property
    def _boundary_bytes(self) -> int:
        shape, dtype = self._boundary
        return math.prod(shape) * dtype.itemsize

    def pipeline_traffic(self) -> Iterator[CollectiveTraffic]:
        """Yield sends and receives between pipeline stages, including the gradient of tied embeddings."""
        neighbors = sum((not model_part.first) + (not model_part.last) for model_part in self.model_parts)
        count = neighbors * self._workload.ga
        size = count * self._boundary_bytes
        first, last = self.model_parts[0], self.model_parts[-1]
        if self._pipelined and first.model.tied_embeddings and (first.first or last.last):
            (tied,) = (bucket for bucket in self.optimizer.buckets if TIED in bucket.names)
            count, size = count + 1, size + tied.shard_size * tied.formats.gradients.itemsize
        for kind in ("send", "receive") if self._pipelined else ():
            yield CollectiveTraffic(kind=kind, dimension="pp", ranks=self._mesh.size("pp"), count=count, bytes=size)

    def _begin_step(self) -> None:
        for model_part in self.model_parts:
            begin_step(model_part)

    def _update(self) -> None:
        self.optimizer.update(self._workload.lr)
        self._mesh.all_reduce(torch.zeros(()))

    def _cost(self, run: Callable[[], None]) -> PassCost:
        """Call `run` and return its cost."""
        watch, memory = self._watch, self._memory
        before = memory.now()
        watch.flops, watch.calls, watch.bytes = 0.0, Counter(), Counter()
        memory.reset_peak()
        run()
        peak, change = (_difference(held, before) for held in (memory.at_peak(), memory.now()))
        return PassCost(peak, change, watch.flops, watch.calls, watch.bytes)


def _kind(micro: int, ga: int) -> str:
    """Return the kind of a micro-batch; those of the same kind cost the same."""
    if ga == 1:
        return "only"
    return "first" if micro == 0 else "last" if micro == ga - 1 else "middle"


def _difference(a: dict[str, int], b: dict[str, int]) -> BytesByPurpose:
    result = Counter(a)
    result.subtract(b)
    return result
