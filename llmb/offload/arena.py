"""All memory of a run but what one computation uses in between: a slab on the device and one on the host, cut up once.

    arena = Arena(model, plan, device, home_slots, budgets)
    arena.buffer("param", 3).copy_(arena.home("param", 17), non_blocking=True)

A kind's buffers on the device are as many as the plan says, its places at home as many as its program needs. No memory
is taken or given back while the run goes on, and more than the budgets is never taken: what lacks is said before the
run. On a GPU torch's allocator, from which the slab and all between come, is held to the device's budget, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.errors import ConfigError
from llmb.offload.pinned_memory import HostSlab
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import piece_bytes
from llmb.perfmodel.offload.plan_memory import CONTEXT_BYTES, buffers_of, device_bytes, homes_of, host_bytes


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What a run may take. Null: all there is."""

    host_gib: float | None = None
    device_gib: float | None = None


UNLIMITED = Budgets()


class Arena:
    """The buffers of every kind, by their numbers."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        device: torch.device,
        home_slots: dict[str, int],
        budgets: Budgets = UNLIMITED,
        host_slab: HostSlab | None = None,
    ):
        """`home_slots`: places at home for kinds of which no piece has one of its own. A slab given is used again."""
        _check_budgets(model, plan, device, home_slots, budgets)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            _limit_allocator(device, budgets.device_gib)
        self.device, self.sizes = device, piece_bytes(model, plan)
        buffers = buffers_of(plan)
        self.homes = homes_of(model, plan, home_slots)
        self.host_bytes = self._total(self.homes)
        self._host = HostSlab(self.host_bytes, device) if host_slab is None else host_slab
        if self._host.size < self.host_bytes:
            raise ConfigError(f"a host slab of {self._host.size} bytes is given, the plan needs {self.host_bytes}")
        self.slab = torch.empty(self._total(buffers), dtype=torch.uint8, device=device)
        self._behind_weights = self._total({"param": buffers["param"]})
        self._buffers = self._cut(self.slab, buffers)
        self._homes = self._cut(self._host.memory, self.homes)
        if device.type == "cuda":
            _set_aside(device_bytes(model, plan, device.type)["workspace"], device)

    def buffer(self, kind: str, number: int) -> Tensor:
        """A buffer on the device, as bytes."""
        return self._buffers[kind][number]

    def home(self, kind: str, number: int) -> Tensor:
        """A place on the host, as bytes."""
        return self._homes[kind][number]

    def scratch(self, shape: torch.Size) -> Tensor:
        """fp32 memory on the device until the first step: that of all but weights, or new where it is too small."""
        size = 4 * shape.numel()
        if size > self.slab.numel() - self._behind_weights:
            return torch.empty(shape, device=self.device)
        return self.slab[self._behind_weights : self._behind_weights + size].view(torch.float32).view(shape)

    @property
    def device_bytes(self) -> int:
        """The most that was taken on the device so far: the slab and what computations used beside it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return self.slab.numel()

    def _total(self, counts: dict[str, int]) -> int:
        return sum(self.sizes[kind] * count for kind, count in counts.items())

    def _cut(self, slab: Tensor, counts: dict[str, int]) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        first = 0
        for kind, count in counts.items():
            end = first + self.sizes[kind] * count
            found[kind] = list(slab[first:end].view(count, self.sizes[kind]).unbind()) if count else []
            first = end
        return found


def _check_budgets(
    model: Model, plan: Plan, device: torch.device, home_slots: dict[str, int], budgets: Budgets
) -> None:
    needed = {
        "host": (sum(host_bytes(model, plan, home_slots).values()), budgets.host_gib),
        "device": (sum(device_bytes(model, plan, device.type).values()), budgets.device_gib),
    }
    for side, (size, budget) in needed.items():
        if budget is not None and size > budget * GIB:
            raise ConfigError(
                f"the plan needs {size / GIB:.2f} GiB on the {side}, more than {side}_gib={budget:g}; "
                f"`llmb-run plan` makes one for given budgets"
            )


def _set_aside(size: int, device: torch.device) -> None:
    """Have torch keep memory for what computations use in between, in one piece: it is whole again behind each.

    Memory that matrix products keep for good is taken before, so that it does not lie in the middle.
    """
    square = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    torch.mm(square, square)
    torch.empty(size, dtype=torch.uint8, device=device)


def _limit_allocator(device: torch.device, device_gib: float | None) -> None:
    """More than the budget, less what the driver takes for itself, is refused as if the GPU had no more."""
    total = torch.cuda.get_device_properties(device).total_memory
    limit = total if device_gib is None else device_gib * GIB - CONTEXT_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
