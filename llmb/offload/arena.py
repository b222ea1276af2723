"""Arena: a slab on the device and a pinned one on the host, cut into buffers and slots once.

    arena = Arena(model, plan, device, host_slots, budgets)
    arena.buffer("param", 3).copy_(arena.host_slot("param", 17), non_blocking=True)

The plan says how many device buffers each kind has, the program how many host slots. Except for the workspace of tasks
nothing is allocated or freed during the run, and never more than the budgets: a plan that needs more is refused before
the run. On a GPU torch's allocator, which serves the slab and the workspace, is limited to the device's budget.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.errors import ConfigError
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import buffer_bytes
from llmb.perfmodel.offload.plan_memory import (
    CONTEXT_BYTES,
    buffer_counts,
    device_bytes,
    disk_bytes,
    host_bytes,
    host_slot_counts,
)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Memory budgets of a run. Null: all there is."""

    host_gib: float | None = None
    device_gib: float | None = None
    disk_gib: float | None = None


UNLIMITED = Budgets()
SMALL_ALLOCATIONS = 8 << 20  # bytes left to scalars and the batches, which have blocks of their own


class Arena:
    """Buffers of every kind, by their index."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        device: torch.device,
        host_slots: dict[str, int],
        budgets: Budgets = UNLIMITED,
        host_slab: HostSlab | None = None,
    ):
        """`host_slots`: number of slots of the kinds that share them. A given slab is reused."""
        _check_budgets(model, plan, device, host_slots, budgets)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            limit = _limit_allocator(device, budgets.device_gib)
        self.device, self.sizes = device, buffer_bytes(model, plan)
        buffers = buffer_counts(plan)
        self.host_slots = host_slot_counts(model, plan, host_slots)
        self.host_bytes = self._total(self.host_slots)
        self._host = HostSlab(self.host_bytes, device) if host_slab is None else host_slab
        if self._host.size < self.host_bytes:
            raise ConfigError(f"a host slab of {self._host.size} bytes was given, the plan needs {self.host_bytes}")
        self.slab = torch.empty(self._total(buffers), dtype=torch.uint8, device=device)
        self._after_weights = self._total({"param": buffers["param"]})
        self._buffers = self._split(self.slab, buffers)
        self._host_slots = self._split(self._host.memory, self.host_slots)
        if device.type == "cuda":
            _reserve_workspace(device_bytes(model, plan, device.type)["workspace"], limit, device)

    def buffer(self, kind: str, index: int) -> Tensor:
        """Return a device buffer, as bytes."""
        return self._buffers[kind][index]

    def host_slot(self, kind: str, index: int) -> Tensor:
        """Return a host slot, as bytes."""
        return self._host_slots[kind][index]

    def scratch(self, shape: torch.Size) -> Tensor:
        """Return fp32 memory on the device, until the first step: that of all but weights, or new if too small."""
        size = 4 * shape.numel()
        if size > self.slab.numel() - self._after_weights:
            return torch.empty(shape, device=self.device)
        return self.slab[self._after_weights : self._after_weights + size].view(torch.float32).view(shape)

    @property
    def device_bytes(self) -> int:
        """Peak memory on the device so far: the slab and the workspace."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return self.slab.numel()

    def _total(self, counts: dict[str, int]) -> int:
        return sum(self.sizes[kind] * count for kind, count in counts.items())

    def _split(self, slab: Tensor, counts: dict[str, int]) -> dict[str, list[Tensor]]:
        buffers: dict[str, list[Tensor]] = {}
        first = 0
        for kind, count in counts.items():
            end = first + self.sizes[kind] * count
            buffers[kind] = list(slab[first:end].view(count, self.sizes[kind]).unbind()) if count else []
            first = end
        return buffers


def _check_budgets(
    model: Model, plan: Plan, device: torch.device, host_slots: dict[str, int], budgets: Budgets
) -> None:
    needed = {
        "host": (sum(host_bytes(model, plan, host_slots).values()), budgets.host_gib),
        "device": (sum(device_bytes(model, plan, device.type).values()), budgets.device_gib),
        "disk": (sum(disk_bytes(model, plan).values()), budgets.disk_gib),
    }
    for side, (size, budget) in needed.items():
        if budget is not None and size > budget * GIB:
            raise ConfigError(
                f"the plan needs {size / GIB:.2f} GiB on the {side}, more than {side}_gib={budget:g}; "
                f"`llmb-run plan` makes one for given budgets"
            )


def _reserve_workspace(size: int, limit: int, device: torch.device) -> None:
    """Have torch reserve the workspace as one block, which is whole again after each task.

    cuBLAS allocates its own workspace first, so that it does not lie in the middle; the planner counts it as part of
    the workspace, hence the block is no larger than what the limit leaves.
    """
    square = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    torch.mm(square, square)
    left = limit - torch.cuda.memory_reserved(device) - SMALL_ALLOCATIONS
    torch.empty(max(0, min(size, left)), dtype=torch.uint8, device=device)


def _limit_allocator(device: torch.device, device_gib: float | None) -> int:
    """Make torch refuse to allocate more than the budget less the driver's context; returns the limit in bytes."""
    total = torch.cuda.get_device_properties(device).total_memory
    limit = total if device_gib is None else min(total, int(device_gib * GIB) - CONTEXT_BYTES)
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    return limit
