"""Dry run of one rank at full size on the meta device: memory, FLOPs and collectives of a step.

    python -m llmb.train.dry_run.dry_run config.json      # one line of JSON

The rank is built by the same passes as for training, on the meta device and with torch's `fake` process group, and
takes the code path of a GPU through every kernel. Allocations that torch makes outside of operators are tracked here.

Not included: the CUDA context, NCCL buffers, library workspaces (about 0.1 GiB) and fragmentation.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from llmb.config.native.training_support import supported_training
from llmb.config.serialization import build, read_json, to_json
from llmb.config.spec import RunConfig, Training
from llmb.errors import LlmbError
from llmb.ops import dispatch
from llmb.perfmodel.communication import CollectiveTraffic
from llmb.perfmodel.dry_run_summary import DryRunSummary
from llmb.perfmodel.expert_capacity import dispatched_rows, routed_rows
from llmb.perfmodel.pipeline_schedule import bubble
from llmb.train.activation_offload import CopyStream
from llmb.train.dry_run.dispatch_watch import DispatchWatch
from llmb.train.dry_run.fused_op_shapes import fused_shapes
from llmb.train.dry_run.memory_tracker import ACTIVATIONS, MemoryTracker
from llmb.train.dry_run.meta_rank import GRADIENTS, OPTIMIZER, WEIGHTS, MetaRank, StepCost
from llmb.train.parallel.mesh import Mesh, build_mesh

CPU = torch.device("cpu")

UNTRACKED = ((DeviceMesh, "_compute_coordinates_from_mesh"), (DeviceMesh, "_concatenate"))
FAKE = "fake"  # process group backend without communication


@contextmanager
def dry_run_rank(config: RunConfig, rank: int) -> Iterator[tuple[Mesh, DispatchWatch]]:
    """Run the code inside on the meta device, in a fake process group; yields the mesh and the counters."""
    fraction = routed_rows(config) / dispatched_rows(config) if config.model.experts else 1.0
    watch = DispatchWatch(MemoryTracker(), fraction)
    dispatch.begin_dry_run(partial(_count_scan, watch))
    mesh = _mesh(config, rank)
    with (
        _untracked(),
        _track_resize(watch.memory),
        _track_host_buffers(watch.memory),
        watch,
        torch.device("meta"),
        fused_shapes(config.flops_convention, watch.add_flops),
    ):
        yield mesh, watch


def _mesh(config: RunConfig, rank: int) -> Mesh:
    if config.parallel.world_size == 1:
        return Mesh(0, 1, CPU)
    dist.init_process_group(FAKE, rank=rank, world_size=config.parallel.world_size, store=FakeStore())
    return build_mesh(rank, CPU, config.parallel, experts=config.model.experts is not None)


@contextmanager
def _untracked() -> Iterator[None]:
    """Exclude torch's own computations about ranks and shapes, which need real CPU tensors."""

    def untracked(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes(), torch.device("cpu"):
                return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in UNTRACKED:
            if name in vars(owner):
                attribute = vars(owner)[name]
                is_static = isinstance(attribute, staticmethod)
                wrapped = untracked(attribute.__func__ if is_static else attribute)
                stack.enter_context(patch.object(owner, name, staticmethod(wrapped) if is_static else wrapped))
        yield


def _track_resize(memory: MemoryTracker) -> AbstractContextManager[Any]:
    """Track storages of gathered weights, which FSDP frees and reallocates without an operator."""
    resize = torch.UntypedStorage.resize_

    def tracked(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        memory.resized(storage, WEIGHTS)
        return storage

    return patch.object(torch.UntypedStorage, "resize_", tracked)


def _track_host_buffers(memory: MemoryTracker) -> AbstractContextManager[Any]:
    """Count buffers of offloaded activations as host memory."""
    allocate = CopyStream.allocate

    def tracked(copies: CopyStream, size: int) -> Tensor:
        memory.to_host = True
        try:
            return allocate(copies, size)
        finally:
            memory.to_host = False

    return patch.object(CopyStream, "allocate", tracked)


def _count_scan(watch: DispatchWatch, kernel: str, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Count the FLOPs of the Mamba SSD scan as `perfmodel/flops.py` does; backward is twice forward."""
    times = {"ssd_kernels_triton.scan_kernel": 1, "ssd_kernels_triton.input_grads_kernel": 2}.get(kernel)
    if times is None:
        return
    x_BTHP, c_BTGN = (arguments[0], arguments[1]) if times == 1 else (arguments[1], arguments[2])
    batch, tokens, heads, width = x_BTHP.shape
    inner, groups, state, chunk = heads * width, c_BTGN.shape[2], c_BTGN.shape[3], constants["CHUNK"]
    macs = chunk * inner + 2 * state * inner + chunk * state * groups
    watch.add_flops(times * 2.0 * batch * tokens * macs)


def dry_run(config: RunConfig) -> DryRunSummary:
    """Return the dry run of one rank: of the first or last pipeline stage, by memory, or of the one that runs."""
    if isinstance(config.workload, Training):  # the memory of a graph is unknown here, and it changes nothing else
        config = replace(config, workload=replace(config.workload, cuda_graphs=False))
    workload, layout = supported_training(config), config.parallel
    ends = dict.fromkeys((0, (layout.pp - 1) * layout.world_size // layout.pp))
    if config.one_rank is not None:
        ends = dict.fromkeys((config.one_rank.rank,))
    # Each in a separate process: the default process group is initialized once per process.
    with ProcessPoolExecutor(len(ends), mp_context=get_context("fork")) as pool:
        return max(pool.map(partial(_dry_run_of, config, workload), ends), key=lambda summary: summary.peak_bytes)


def _dry_run_of(config: RunConfig, workload: Training, rank: int) -> DryRunSummary:
    start = time.perf_counter()
    with dry_run_rank(config, rank) as (mesh, watch):
        meta_rank = MetaRank(config, workload, mesh, watch)
        step = meta_rank.step()
        return DryRunSummary(
            rank=rank,
            parameters=meta_rank.parameters,
            weight_bytes=step.peak[WEIGHTS],
            gradient_bytes=step.peak[GRADIENTS],
            optimizer_bytes=step.peak[OPTIMIZER],
            activation_bytes=step.peak[ACTIVATIONS],
            peak_bytes=step.peak.total(),
            host_bytes=watch.memory.host_peak,
            flops=step.flops,
            bubble=bubble(mesh.size("pp"), mesh.parallel.vp, workload.ga),
            collectives=(*_collectives(step, mesh), *meta_rank.pipeline_traffic()),
            seconds=time.perf_counter() - start,
        )


def _collectives(step: StepCost, mesh: Mesh) -> Iterator[CollectiveTraffic]:
    groups = _groups(mesh)
    for (kind, group), count in sorted(step.calls.items()):
        dimension, ranks = groups[group]
        yield CollectiveTraffic(kind=kind, dimension=dimension, ranks=ranks, count=count, bytes=step.bytes[kind, group])


def _groups(mesh: Mesh) -> dict[str, tuple[str, int]]:
    """Return the mesh dimension and size of each process group, by name."""
    if mesh.world_size == 1:
        return {}
    groups = {str(dist.group.WORLD.group_name): ("all", mesh.world_size)}  # type: ignore[union-attr]
    for device_mesh in (mesh.expert, mesh.dense, mesh.stage, mesh.replicas):  # the last two may be one
        if device_mesh is None:
            continue
        for name in device_mesh.mesh_dim_names or ():
            group = device_mesh.get_group(name)
            groups[str(group.group_name)] = (name, group.size())
    return groups


def main(arguments: list[str]) -> int:
    """Run the command line, which is one path."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m llmb.train.dry_run.dry_run config.json", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 1
    path = Path(arguments[0])
    try:
        print(to_json(dry_run(build(RunConfig, read_json(path), where=path.name))))
    except LlmbError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
