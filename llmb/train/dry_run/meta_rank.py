"""One rank of a run, built of tensors without values, and what a step of it takes.

Of a step's micro-batches only those are computed that differ: the first, which finds no gradients, one from the middle,
and the last, which reduces them. The others are like the middle one, and a pipeline's are put together in the order of
torch's own schedule. Optimizer state and weights that are kept in 8 bits are there from the start, as they are from
the second step on.
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
from llmb.perfmodel.communication import Collective
from llmb.perfmodel.pipeline_schedule import SENDS_UNDER_WAY, rank_order
from llmb.train.dry_run.dispatch_watch import Watch
from llmb.train.dry_run.memory_tracker import REST
from llmb.train.fused_llama import begin_step
from llmb.train.parallel.fsdp import before_micro_batch, lay_out
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.pipeline import TIED, stream_between
from llmb.train.parallelize import halve, optimizer_of, shaped_parts
from llmb.train.precision import Fp8GroupedLinear

WEIGHTS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"

Parts = Counter[str]  # bytes by what they are for


@dataclass(frozen=True)
class Cost:
    """What one pass of a part of the network does, seen from where it began."""

    peak: Parts  # above what was there before
    left: Parts  # more than before when it is over; negative where it is less
    flops: float
    calls: Counter[Any]
    bytes: Counter[Any]


@dataclass
class Step:
    """A step put together from passes: what is held now, the most that was held at once, and all that was done."""

    held: Parts
    peak: Parts = field(default_factory=Counter)
    flops: float = 0.0
    calls: Counter[Any] = field(default_factory=Counter)
    bytes: Counter[Any] = field(default_factory=Counter)

    def add(self, cost: Cost) -> None:
        """Go on with one more pass."""
        highest = _sum(self.held, cost.peak)
        if highest.total() > self.peak.total():
            self.peak = highest
        self.held = _sum(self.held, cost.left)
        self.flops += cost.flops
        self.calls.update(cost.calls)
        self.bytes.update(cost.bytes)


class Rank:
    """One rank, built and ready to compute."""

    def __init__(self, config: RunConfig, work: Training, mesh: Mesh, watch: Watch):
        self._work, self._mesh, self._watch = work, mesh, watch
        self._footprint = watch.footprint
        self._pipelined = mesh.size("pp") > 1
        stream = stream_between(config, work, mesh)
        self._stream = stream.shape, stream.dtype
        del stream  # it would count as held
        self.parts = shaped_parts(config, work, mesh)
        for part in self.parts:
            lay_out(part)
            halve(part, config)
            begin_step(part)
            for module in part.modules():
                if isinstance(module, Fp8GroupedLinear):
                    module.make_forms()
        self._footprint.claim(WEIGHTS)
        self.optimizer = optimizer_of(self.parts, work, mesh)
        whole = [one for group in self.optimizer.adamw.param_groups for one in group["params"]]
        self._moments = [torch.empty_like(one) for one in (*whole, *whole)]
        self.optimizer.halves.make_state()
        vars(self.optimizer.adamw)["step"] = _nothing  # works in place, and on no tensor without values
        self._footprint.claim(OPTIMIZER)

    @property
    def parameters(self) -> int:
        """How many numbers the optimizer of this rank updates."""
        return sum(one.numel() for one in self.optimizer.slices.values())

    def step(self) -> Step:
        """All micro-batches of a step and the update at its end."""
        ga, place = self._work.ga, self._mesh.index("pp")
        step = Step(Counter(self._footprint.now()))
        if self._pipelined and self._mesh.parallel.overlap_send:
            step.held[REST] += SENDS_UNDER_WAY * self._stream_bytes
        costs = [self._costs(part) for part in self.parts]
        for part, micro, forward in rank_order(self._mesh.size("pp"), self._mesh.parallel.vp, ga, place):
            step.add(costs[part][_kind(micro, ga), forward])
        step.add(self._cost(self._update))
        return step

    def _costs(self, part: Network) -> dict[tuple[str, bool], Cost]:
        """Of each kind of micro-batch, forward and backward."""
        costs: dict[tuple[str, bool], Cost] = {}
        few = min(self._work.ga, 3)
        for micro in range(few):
            costs |= self._costs_of_micro_batch(part, _kind(micro, few))
        return costs

    def _costs_of_micro_batch(self, part: Network, kind: str) -> dict[tuple[str, bool], Cost]:
        before_micro_batch(part, self._mesh, last=kind in ("last", "only"))
        tokens = torch.zeros(self._work.mbs, self._work.seqlen // self._mesh.size("cp"), dtype=torch.int64)
        self._footprint.label(REST, [tokens])
        held: list[Tensor] = []  # from the forward pass to the backward pass

        def forward() -> None:
            given = tokens if part.first else self._received(requires_grad=True)
            out = part(given, tokens if part.last else None)
            if not part.last:  # it is sent, and its memory goes with the send
                out.data = out.new_empty(()).expand(out.shape)
            held.extend((given, out))
            self._footprint.label(WEIGHTS, part.parameters())  # with those that stay gathered

        def backward() -> None:
            held.pop().backward(None if part.last else self._received())
            held.clear()
            self._footprint.claim(GRADIENTS)  # nothing else stays

        return {(kind, True): self._cost(forward), (kind, False): self._cost(backward)}

    def _received(self, requires_grad: bool = False) -> Tensor:
        """The stream between two stages, or its gradient."""
        shape, dtype = self._stream
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)

    @property
    def _stream_bytes(self) -> int:
        shape, dtype = self._stream
        return math.prod(shape) * dtype.itemsize

    def handed_on(self) -> Iterator[Collective]:
        """What passes between neighbours in the pipeline, and the gradient of a matrix that both of its ends hold."""
        neighbours = sum((not part.first) + (not part.last) for part in self.parts)
        count = neighbours * self._work.ga
        size = count * self._stream_bytes
        if self._pipelined and self.parts[0].model.tied_embeddings and (self.parts[0].first or self.parts[-1].last):
            count, size = count + 1, size + self.optimizer.slices[TIED].numel() * torch.float32.itemsize
        for kind in ("send", "receive") if self._pipelined else ():
            yield Collective(kind=kind, dimension="pp", ranks=self._mesh.size("pp"), count=count, bytes=size)

    def _update(self) -> None:
        self.optimizer.update(self._work.lr)
        self._mesh.total(torch.zeros(()))

    def _cost(self, work: Callable[[], None]) -> Cost:
        """Do it, and see what it took."""
        watch, footprint = self._watch, self._footprint
        before = footprint.now()
        watch.flops, watch.calls, watch.bytes = 0.0, Counter(), Counter()
        footprint.begin()
        work()
        peak, left = (_difference(found, before) for found in (footprint.at_peak(), footprint.now()))
        return Cost(peak, left, watch.flops, watch.calls, watch.bytes)


def _nothing() -> None:
    """An update that costs no memory."""


def _kind(micro: int, ga: int) -> str:
    """Micro-batches of the same kind do the same."""
    if ga == 1:
        return "only"
    return "first" if micro == 0 else "last" if micro == ga - 1 else "middle"


def _sum(one: Parts, other: Parts) -> Parts:
    total = Counter(one)
    total.update(other)  # unlike +, keeps what is negative
    return total


def _difference(one: dict[str, int], other: dict[str, int]) -> Parts:
    less = Counter(one)
    less.subtract(other)
    return less
