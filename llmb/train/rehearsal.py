"""One rank of a run at its real size, without the hardware: what it holds, computes and sends in a step.

    python -m llmb.train.rehearsal config.json      # one line of JSON

The rank is built by the same passes as for training, on tensors that have shapes but no values (FakeTensorMode) and in
a process group that has ranks but no processes (`fake`). It takes the GPU's way through every kernel. Of a step's
micro-batches only those are computed that differ: the first, which finds no gradients, one from the middle, and the
last, which reduces them. The others are like the middle one, and a pipeline's are put together in the order of torch's
own schedule. Optimizer state is there from the start, as it is from the second step on.

Leaves out: the CUDA context, NCCL's buffers, libraries' workspaces (about 0.1 GiB) and fragmentation.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from llmb.errors import ConfigError
from llmb.kernels import triton_device
from llmb.models.architectures import Network
from llmb.plain import build, read_json, to_plain
from llmb.schedule import rank_order
from llmb.spec import RunConfig, Training
from llmb.traffic import Collective
from llmb.train.footprint import REST, Footprint
from llmb.train.fused_shapes import fused_shapes
from llmb.train.mesh import DENSE, EXPERT, REPLICAS, Mesh, divided
from llmb.train.offload import Lane
from llmb.train.optimizer import Optimizer
from llmb.train.parallelize import shaped_parts
from llmb.train.pipeline import copied_weights
from llmb.train.sharding import before_micro_batch, lay_out
from llmb.train.watch import Watch

CPU = torch.device("cpu")

UNWATCHED = (
    (DeviceMesh, "_compute_coordinates_from_mesh"),
    (DeviceMesh, "_concatenate"),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
)
WEIGHTS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
FAKE = "fake"  # torch's process group without processes

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
        shape = (work.mbs, work.seqlen // mesh.size("cp") // mesh.size("tp"), config.model.hidden)
        self._stream = shape, torch.float32 if config.precision.dtype == "fp32" else torch.bfloat16
        self._kept: list[Tensor] = []  # torch's schedules hold received tensors and their gradients until the step ends
        self.parts = shaped_parts(config, work, mesh)
        for part in self.parts:
            lay_out(part)
        self._footprint.claim(WEIGHTS)
        named = [pair for part in self.parts for pair in part.named_parameters()]
        self.optimizer = Optimizer(named, mesh, work.lr, copied_weights(self.parts))
        self._moments = [torch.empty_like(one) for one in (*self.optimizer.slices.values(),) * 2]
        self.optimizer.adamw.step = lambda: None  # type: ignore[assignment, method-assign]
        self._footprint.claim(OPTIMIZER)

    @property
    def parameters(self) -> int:
        """How many numbers the optimizer of this rank updates."""
        return sum(one.numel() for one in self.optimizer.slices.values())

    def step(self) -> Step:
        """All micro-batches of a step and the update at its end."""
        ga, place = self._work.ga, self._mesh.index("pp")
        step = Step(Counter(self._footprint.now()))
        step.held[REST] += self._received_bytes()
        costs = [self._costs(part) for part in self.parts]
        for part, micro, forward in rank_order(self._mesh.size("pp"), self._mesh.parallel.vp, ga, place):
            step.add(costs[part][_kind(micro, ga), forward])
        step.add(self._cost(self._update))
        return step

    def _costs(self, part: Network) -> dict[tuple[str, bool], Cost]:
        """Of each kind of micro-batch, forward and backward."""
        costs = {}
        few = min(self._work.ga, 3)
        for micro in range(few):
            costs |= self._costs_of_micro_batch(part, _kind(micro, few))
        return costs

    def _costs_of_micro_batch(self, part: Network, kind: str) -> dict[tuple[str, bool], Cost]:
        before_micro_batch(part, last=kind in ("last", "only"))
        given, slope = self._received(part)
        labels = torch.zeros(self._work.mbs, self._work.seqlen // self._mesh.size("cp"), dtype=torch.int64)
        out: list[Tensor] = []

        def forward() -> None:
            out.append(part(given, labels if part.last else None))
            self._footprint.label(WEIGHTS, part.parameters())  # with those that stay gathered

        def backward() -> None:
            out.pop().backward(slope)
            self._footprint.label(REST, (one for x in self._kept for one in (x, x.grad) if one is not None))
            self._footprint.claim(GRADIENTS)  # nothing else stays

        return {(kind, True): self._cost(forward), (kind, False): self._cost(backward)}

    def _received(self, part: Network) -> tuple[Tensor, Tensor | None]:
        """What a part works on, and the gradient of what it makes."""
        shape, dtype = self._stream
        if part.first:
            given = torch.zeros(self._work.mbs, self._work.seqlen // self._mesh.size("cp"), dtype=torch.int64)
        else:
            given = torch.empty(shape, dtype=dtype, requires_grad=True)
        slope = None if part.last else torch.empty(shape, dtype=dtype)
        self._kept += [given] if slope is None else [given, slope]
        return given, slope

    def _received_bytes(self) -> int:
        """Torch's stages have memory for what they receive of every micro-batch, in both directions."""
        shape, dtype = self._stream
        received = sum((not part.first) + (not part.last) for part in self.parts)
        return self._work.ga * received * math.prod(shape) * dtype.itemsize

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


@contextmanager
def rehearsing(config: RunConfig, rank: int) -> Iterator[tuple[Mesh, Watch]]:
    """Everything made inside has shapes only, among ranks that are not there."""
    watch = Watch(Footprint())
    triton_device.rehearse(partial(_count_scan, watch))
    mesh = _mesh(config, rank)
    with ExitStack() as stack:
        stack.enter_context(_unwatched())
        stack.enter_context(_followed_resizing(watch.footprint))
        stack.enter_context(_host_buffers(watch.footprint))
        stack.enter_context(patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda _group: None))
        stack.enter_context(watch)
        stack.enter_context(torch.device("meta"))
        stack.enter_context(fused_shapes(config.flops_convention, watch.add_flops))
        yield mesh, watch


def _mesh(config: RunConfig, rank: int) -> Mesh:
    if config.parallel.world_size == 1:
        return Mesh(0, 1, CPU)
    dist.init_process_group(FAKE, rank=rank, world_size=config.parallel.world_size, store=FakeStore())
    return divided(rank, CPU, config.parallel, experts=config.model.experts is not None)


@contextmanager
def _unwatched() -> Iterator[None]:
    """What torch computes about ranks and shapes is none of the rank's work, and needs tensors of its own kinds."""

    def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            with _disable_current_modes(), torch.device("cpu"):
                return function(*arguments, **named)

        return called

    with ExitStack() as stack:
        for owner, name in UNWATCHED:
            if name in vars(owner):
                found = vars(owner)[name]
                plain = found.__func__ if isinstance(found, staticmethod) else found
                made = staticmethod(unwatched(plain)) if isinstance(found, staticmethod) else unwatched(plain)
                stack.enter_context(patch.object(owner, name, made))
        yield


@contextmanager
def _followed_resizing(footprint: Footprint) -> Iterator[None]:
    """FSDP frees and refills the storages of gathered weights, which no operation shows."""
    resize = torch.UntypedStorage.resize_

    def followed(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        footprint.resized(storage, WEIGHTS)
        return storage

    with patch.object(torch.UntypedStorage, "resize_", followed):
        yield


@contextmanager
def _host_buffers(footprint: Footprint) -> Iterator[None]:
    """What is offloaded lies on the host."""
    take = Lane.take

    def taken(lane: Lane, size: int) -> Tensor:
        footprint.to_host = True
        try:
            return take(lane, size)
        finally:
            footprint.to_host = False

    with patch.object(Lane, "take", taken):
        yield


def _count_scan(watch: Watch, kernel: str, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """The recurrence of Mamba, counted as in `costs.mamba`; its backward pass as twice the forward."""
    times = {"ssd_kernels.scan_kernel": 1, "ssd_kernels.input_slopes_kernel": 2}.get(kernel)
    if times is None:
        return
    x_BTHP, c_BTGN = (arguments[0], arguments[1]) if times == 1 else (arguments[1], arguments[2])
    batch, tokens, heads, width = x_BTHP.shape
    inner, groups, state, chunk = heads * width, c_BTGN.shape[2], c_BTGN.shape[3], constants["CHUNK"]
    macs = chunk * inner + 2 * state * inner + chunk * state * groups
    watch.add_flops(times * 2.0 * batch * tokens * macs)


def rehearse(config: RunConfig) -> dict[str, Any]:
    """What a step of this run is for one rank."""
    work = config.workload
    if config.engine != "native" or not isinstance(work, Training):
        raise ConfigError("only training by the native engine can be rehearsed")
    began = time.perf_counter()
    rank = 0
    with rehearsing(config, rank) as (mesh, watch):
        made = Rank(config, work, mesh, watch)
        step = made.step()
    return {
        "rank": rank,
        "parameters": made.parameters,
        "bytes": {name: step.peak[name] for name in (WEIGHTS, GRADIENTS, OPTIMIZER, REST)},
        "peak_bytes": step.peak.total(),
        "host_bytes": watch.footprint.host_peak,
        "flops": step.flops,
        "collectives": [to_plain(one) for one in _collectives(step, mesh)],
        "seconds": time.perf_counter() - began,
    }


def _collectives(step: Step, mesh: Mesh) -> Iterator[Collective]:
    groups = _groups(mesh)
    for (kind, group), count in sorted(step.calls.items()):
        dimension, ranks = groups[group]
        yield Collective(kind=kind, dimension=dimension, ranks=ranks, count=count, bytes=step.bytes[kind, group])


def _groups(mesh: Mesh) -> dict[str, tuple[str, int]]:
    """Process groups by name: the dimension each is along, and its size."""
    if mesh.world_size == 1:
        return {}
    found = {str(dist.group.WORLD.group_name): ("all", mesh.world_size)}  # type: ignore[union-attr]
    for whole, names in ((mesh.expert, EXPERT), (mesh.dense, DENSE), (mesh.replicas, (REPLICAS,))):
        for name in names if whole is not None else ():
            group = whole.get_group(name)
            found[str(group.group_name)] = (name, group.size())
    return found


def main(arguments: list[str]) -> int:
    """The command line: one path."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m llmb.train.rehearsal config.json", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 1
    path = Path(arguments[0])
    print(json.dumps(rehearse(build(RunConfig, read_json(path), where=path.name))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
