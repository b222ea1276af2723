"""Recompute and offload of activations: as few layers as make a layout fit.

    fitting_variants(setup, {}, external_room(setup))     -> the layout as it is, or with recompute, or with offload

A layer is recomputed or offloaded only where the layout does not fit without: recompute repeats its forward, and
offload competes for the host link. The predictor knows no cost of offload, so it is only proposed where it has next to
none: over a coherent link (Grace), or by a GPU that has its host to itself, and as long as the copies of a micro-batch
take no longer than its forward. Over PCIe eight GPUs share the DRAM of two sockets, and each link carries the traffic
of a network card too. Engines offload neither with a pipeline, nor with recompute, nor activations of experts, whose
sizes depend on the routing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmb.perfmodel.hardware import GIB, gpu
from llmb.perfmodel.memory_estimate import MemoryEstimate
from llmb.perfmodel.step_time.predictor import step_memory
from llmb.perfmodel.step_time.step_setup import DEFAULT_ENGINE, StepSetup

# Of a GPU's memory, for layouts that nobody has run: a log of NVIDIA's recipes (llama3.1/README.md, v25.12) reserves
# 216.9 GB for 194.4 allocated, and CUDA context and NCCL buffers take 3 to 5 GiB, 5 % of 80. One GPU has no NCCL.
USABLE_FRACTION, ALONE_USABLE_FRACTION = 0.85, 0.9
COPY_EFFICIENCY = 0.8  # of the host link while both directions copy: 50 of 64 GB/s measured on an H200
HOST_BYTES = 200 * GIB  # host memory of one GPU's activations: nodes of 2 TiB for 8 GPUs, 480 GB for 2 (GB200)
FORWARD_FRACTION = 1 / 3  # of a micro-batch's time
PCIE_BANDWIDTH = 64e9  # of 16 lanes of PCIe 5, bytes/s


@dataclass(frozen=True, kw_only=True)
class MemoryRoom:
    """Memory of a GPU, and the estimate that is compared with it."""

    limit: float  # bytes
    estimate: Callable[[StepSetup], MemoryEstimate]


def usable_fraction(setup: StepSetup) -> float:
    """Return the part of a GPU's memory that a layout may be estimated to take."""
    return ALONE_USABLE_FRACTION if setup.gpus == 1 else USABLE_FRACTION


def external_room(setup: StepSetup) -> MemoryRoom:
    """Return the memory of the run's GPU for engines whose memory is only estimated; unlimited where unknown."""
    capacity = setup.gpu_memory_bytes
    limit = math.inf if capacity is None else usable_fraction(setup) * capacity
    native = setup.engine == "native"  # whose own estimate is exact and takes longer

    def estimate(candidate: StepSetup) -> MemoryEstimate:
        return step_memory(replace(candidate, engine=DEFAULT_ENGINE) if native else candidate)

    return MemoryRoom(limit=limit, estimate=estimate)


def fitting_variants(
    setup: StepSetup, fixed: Mapping[str, Any], room: MemoryRoom
) -> Iterator[tuple[StepSetup, MemoryEstimate]]:
    """Yield the layout with as little recompute, or as little offload, as fits; nothing: it does not fit."""
    recomputed, offloaded = fixed.get("recompute_layers"), fixed.get("offload_layers")
    plain = with_recompute(with_offload(setup, offloaded or 0), recomputed or 0)
    estimate = room.estimate(plain)
    if estimate.total <= room.limit:
        yield plain, estimate
        return
    if recomputed is None and not offloaded:
        yield from _least_change(setup, with_recompute, room)
    if offloaded is None and not recomputed and may_offload(setup):
        yield from _least_change(setup, with_offload, room)


def smallest_variant(setup: StepSetup, fixed: Mapping[str, Any]) -> StepSetup:
    """Return the layout with every layer recomputed, or with the recompute and offload that are fixed."""
    offloaded = fixed.get("offload_layers") or 0
    return with_recompute(with_offload(setup, offloaded), fixed.get("recompute_layers", setup.most_layers - offloaded))


def with_recompute(setup: StepSetup, layers: int) -> StepSetup:
    """Return the run with this many recomputed layers on each pipeline rank, or the next number an engine takes."""
    if layers == (setup.recompute_layers or 0):
        return setup
    changed = replace(setup, recompute="full" if layers else "none", recompute_layers=layers or None)
    return replace(changed, recompute_layers=changed.recomputed_layers) if layers else changed


def with_offload(setup: StepSetup, layers: int) -> StepSetup:
    """Return the run with the activations of this many layers in host memory."""
    return setup if layers == setup.offload_layers else replace(setup, offload_layers=layers)


def may_offload(setup: StepSetup) -> bool:
    """Return whether offload is worth proposing for a layout."""
    bandwidth = gpu(setup.gpu).host_bandwidth or 0.0
    is_free = bandwidth > PCIE_BANDWIDTH or setup.gpus == 1
    return is_free and setup.parallel.pp == 1 and setup.shape.model.experts is None


def copies_are_hidden(setup: StepSetup, host: float, seconds: float) -> bool:
    """Return whether the offloaded bytes of a micro-batch leave during its forward, and find room on the host."""
    forward = FORWARD_FRACTION * seconds / setup.ga
    return host <= min(HOST_BYTES, forward * COPY_EFFICIENCY * (gpu(setup.gpu).host_bandwidth or 0.0))


def _least_change(
    setup: StepSetup, change: Callable[[StepSetup, int], StepSetup], room: MemoryRoom
) -> Iterator[tuple[StepSetup, MemoryEstimate]]:
    """Yield the run with as few changed layers as fit; the estimate falls about linearly with them."""
    most = setup.most_layers
    last = room.estimate(change(setup, most)).total
    if last > room.limit:
        return
    smallest = change(setup, 1)
    unit = smallest.recompute_layers or 1  # layers that change together
    first = room.estimate(smallest).total
    excess = max(0.0, first - room.limit)  # 0 where one change is all, as the last estimate is that of the first
    fewest = unit + math.ceil(excess / (first - last) * (most - unit)) if excess else unit
    for layers in (*range(fewest, most, unit), most):
        changed = change(setup, layers)
        estimate = room.estimate(changed)
        if estimate.total <= room.limit:
            yield changed, estimate
            return
