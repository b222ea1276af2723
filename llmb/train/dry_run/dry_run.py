"""One rank of a run at its real size, without the hardware: what it holds, computes and sends in a step.

    python -m llmb.train.dry_run.dry_run config.json      # one line of JSON

The rank is built by the same passes as for training, of tensors that have shapes but no values (device meta), and in a
process group that has ranks but no processes (`fake`). It takes the GPU's way through every kernel. What torch does
about memory and ranks where no operation shows it is followed here.

Leaves out: the CUDA context, NCCL's buffers, libraries' workspaces (about 0.1 GiB) and fragmentation.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from multiprocessing import get_context
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

from llmb.config.serialization import build, read_json, to_json
from llmb.config.spec import RunConfig, Training
from llmb.errors import LlmbError
from llmb.ops import dispatch
from llmb.perfmodel.communication import Collective
from llmb.perfmodel.dry_run_summary import Rehearsal
from llmb.perfmodel.pipeline_schedule import bubble
from llmb.train.activation_offload import Lane
from llmb.train.dry_run.dispatch_watch import Watch
from llmb.train.dry_run.fused_op_shapes import fused_shapes
from llmb.train.dry_run.memory_tracker import REST, Footprint
from llmb.train.dry_run.meta_rank import GRADIENTS, OPTIMIZER, WEIGHTS, Rank, Step
from llmb.train.parallel.mesh import DENSE, EXPERT, REPLICAS, Mesh, divided
from llmb.train.train_support import supported_workload

CPU = torch.device("cpu")

UNWATCHED = (
    (DeviceMesh, "_compute_coordinates_from_mesh"),
    (DeviceMesh, "_concatenate"),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
)
FAKE = "fake"  # torch's process group without processes


@contextmanager
def is_dry_run(config: RunConfig, rank: int) -> Iterator[tuple[Mesh, Watch]]:
    """Everything made inside has shapes only, among ranks that are not there."""
    watch = Watch(Footprint())
    dispatch.begin_dry_run(partial(_count_scan, watch))
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
    times = {"ssd_kernels_triton.scan_kernel": 1, "ssd_kernels_triton.input_slopes_kernel": 2}.get(kernel)
    if times is None:
        return
    x_BTHP, c_BTGN = (arguments[0], arguments[1]) if times == 1 else (arguments[1], arguments[2])
    batch, tokens, heads, width = x_BTHP.shape
    inner, groups, state, chunk = heads * width, c_BTGN.shape[2], c_BTGN.shape[3], constants["CHUNK"]
    macs = chunk * inner + 2 * state * inner + chunk * state * groups
    watch.add_flops(times * 2.0 * batch * tokens * macs)


def rehearse(config: RunConfig) -> Rehearsal:
    """What a step of this run is for one rank: of the first or the last stage of the pipeline, whichever holds more."""
    if isinstance(config.workload, Training):  # a graph's own memory is not known here, and nothing else of it matters
        config = replace(config, workload=replace(config.workload, cuda_graphs=False))
    work, layout = supported_workload(config), config.parallel
    ends = dict.fromkeys((0, (layout.pp - 1) * layout.world_size // layout.pp))
    # Each in a process of its own: a process can be part of only one group in its life.
    with ProcessPoolExecutor(len(ends), mp_context=get_context("fork")) as pool:
        return max(pool.map(partial(_rehearse, config, work), ends), key=lambda found: found.peak_bytes)


def _rehearse(config: RunConfig, work: Training, rank: int) -> Rehearsal:
    began = time.perf_counter()
    with is_dry_run(config, rank) as (mesh, watch):
        made = Rank(config, work, mesh, watch)
        step = made.step()
        return Rehearsal(
            rank=rank,
            parameters=made.parameters,
            weight_bytes=step.peak[WEIGHTS],
            gradient_bytes=step.peak[GRADIENTS],
            optimizer_bytes=step.peak[OPTIMIZER],
            activation_bytes=step.peak[REST],
            peak_bytes=step.peak.total(),
            host_bytes=watch.footprint.host_peak,
            flops=step.flops,
            bubble=bubble(mesh.size("pp"), mesh.parallel.vp, work.ga),
            collectives=(*_collectives(step, mesh), *made.handed_on()),
            seconds=time.perf_counter() - began,
        )


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
        for name in names:
            if whole is None:
                continue
            group = whole.get_group(name)
            found[str(group.group_name)] = (name, group.size())
    return found


def main(arguments: list[str]) -> int:
    """The command line: one path."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m llmb.train.dry_run.dry_run config.json", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 1
    path = Path(arguments[0])
    try:
        print(to_json(rehearse(build(RunConfig, read_json(path), where=path.name))))
    except LlmbError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
