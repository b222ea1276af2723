"""A model in training, out of core: takes one step after the other and says where each weight is.

    trainer = Trainer(model, plan, device, Settings(seed=1, clip=1.0, home_slots=...), batches, lr)
    trainer.initialise()
    issued = trainer.step(1)                            # Python goes on; the device follows
    issued.ended.wait(); issued.loss, issued.grad_norm

With updates at the next step's forward pass the last step's gradients wait when it is done; `settle` makes the updates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.offload.arena import UNLIMITED, Arena, Budgets
from llmb.offload.chunked_batches import GroupBatch
from llmb.offload.cuda_streams import Lanes, Moment, lanes_on
from llmb.offload.executor import Compute, Executor, Watch
from llmb.offload.initial_state import set_initial_weights
from llmb.offload.offload_dtypes import formats_of
from llmb.offload.pinned_memory import HostSlab
from llmb.offload.step_figures import Figures
from llmb.offload.step_programs import Part, Programs
from llmb.offload.task_compute import AdamStep, Computation
from llmb.perfmodel.offload.buffers import Piece, Units
from llmb.perfmodel.offload.program import Operation, Program
from llmb.perfmodel.offload.step_tasks import Beginning

Next = Literal["step", "settle", "nothing"]


class Reading(Protocol):
    """What makes the batches; see `batches.Batches`."""

    def step(self, step: int) -> Sequence[GroupBatch]: ...
    def rope_rows(self, group: GroupBatch, rows: slice) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is told beside its plan."""

    seed: int
    clip: float | None = None  # largest norm of a step's gradients; none: they are taken as they are
    budgets: Budgets = UNLIMITED
    home_slots: dict[str, int]  # places at home for gradients and activations


@dataclass(frozen=True)
class Issued:
    """A step that the device is to compute, or has."""

    number: int
    ended: Moment
    figures: Tensor  # on the host; good once it has ended

    @property
    def loss(self) -> float:
        return float(self.figures[0])

    @property
    def grad_norm(self) -> float:
        """Before clipping."""
        return float(self.figures[1])


class Trainer:
    """Of one model, plan and device."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        device: torch.device,
        settings: Settings,
        batches: Reading,
        lr: Callable[[int], float],
        host_slab: HostSlab | None = None,
        lanes: Lanes | None = None,
    ):
        """`lr(number)`: of an update, which are counted from 1 as steps are."""
        self.model, self.plan, self.batches, self.lr, self.seed = model, plan, batches, lr, settings.seed
        self.programs, self.formats = Programs(model, plan), formats_of(plan)
        self.arena = Arena(model, plan, device, settings.home_slots, settings.budgets, host_slab)
        self.lanes = lanes_on(device) if lanes is None else lanes
        self.executor = Executor(self.arena, self.lanes)
        self.figures = Figures(device, settings.clip)
        self.computation = Computation(model, plan, self.arena, self.figures, batches.rope_rows, settings.seed)
        self.found = Beginning(updates=0, waiting=False)

    def initialise(self) -> None:
        """Random weights, those of ordinary training."""
        set_initial_weights(self.model, self.seed, self.weights_of, self.arena.scratch)

    def resume(self, updates: int, scales: Mapping[str, Tensor] | None = None) -> None:
        """Go on behind so many updates, with what `scales` were then; if none are given they are measured anew.

        Weights and optimizer state are set by the caller, through `held`.
        """
        self.programs.with_state()
        if self.computation.fp8 is not None and scales is not None:
            self.computation.fp8.scales.restore(scales)
        self.found = Beginning(updates, waiting=False)

    def step(
        self, number: int, then: Next = "step", watch: Watch | None = None, between: Callable[[], None] = lambda: None
    ) -> Issued:
        """Issue a step; `then` is what comes behind it, which decides what stays on the device."""
        program = self.programs.next(Part(self.found), self._part(self._behind_step(), then))
        groups = self.batches.step(number)
        into = torch.empty(2, pin_memory=self.arena.device.type == "cuda")
        compute = self._with_figures(program, self.computation.of(groups, self._update), groups[0].counted, into)
        self.executor.follow(program, compute, watch, between)
        self.found = self._behind_step()
        return Issued(number, self.lanes.moment("compute"), into)

    def settle(self, then: Next = "step") -> None:
        """Make the updates that wait, and wait for everything."""
        if self.found.waiting:
            behind = Beginning(self.found.updates + 1, waiting=False)
            program = self.programs.next(Part(self.found, only_updates=True), self._part(behind, then))
            self.executor.follow(program, self.computation.of((), self._update))
            self.found = behind
        self.lanes.wait()

    def held(self, piece: Piece) -> Tensor:
        """A unit's weights or state as bytes, where they are now; nothing may be under way."""
        buffer = self.programs.buffer_of(piece)
        if buffer is not None:
            return self.arena.buffer(piece.kind, buffer)
        return self.arena.home(piece.kind, self.programs.home_of(piece))

    def weights_of(self, unit: int) -> Tensor:
        """A unit's weights as numbers, where they are now; nothing may be under way."""
        return self.formats.weights(self.held(Piece("param", unit)))

    def unit(self, unit: int) -> dict[str, Tensor]:
        """A unit's weights and optimizer state as numbers, where they are now; nothing may be under way."""
        state = self.formats.state(self.held(Piece("state", unit)))
        kept = {"low": state.low, "m": state.m, "v": state.v}
        return {"param": self.weights_of(unit)} | {name: one for name, one in kept.items() if one is not None}

    @property
    def scales(self) -> dict[str, Tensor] | None:
        """All that 8-bit tensors are scaled by from now on; none in other formats. Nothing may be under way."""
        return None if self.computation.fp8 is None else self.computation.fp8.scales.kept()

    @property
    def units(self) -> range:
        return range(Units(self.model).count)

    @property
    def _update(self) -> AdamStep:
        number = self.found.updates + 1
        return AdamStep(number, self.lr(number))

    def _behind_step(self) -> Beginning:
        if self.plan.update_at == "forward":
            return Beginning(self.found.updates + self.found.waiting, waiting=True)
        return Beginning(self.found.updates + 1, waiting=False)

    def _part(self, found: Beginning, then: Next) -> Part | None:
        if then == "nothing" or (then == "settle" and not found.waiting):
            return None
        return Part(found, only_updates=then == "settle")

    def _with_figures(self, program: Program, compute: Compute, counted: int, into: Tensor) -> Compute:
        """The same; the first computation finds the figures at 0, behind the last they are on their way to the host."""
        first, last = program.operations[0], program.operations[-1]

        def computed(operation: Operation) -> None:
            if operation is first:
                self.figures.begin()
            compute(operation)
            if operation is last:
                self.figures.finish(counted, into)

        return computed
