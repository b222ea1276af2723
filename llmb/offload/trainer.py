"""Out-of-core trainer: takes one step after the other and knows where each weight is.

    trainer = Trainer(model, plan, device, TrainerSettings(seed=1, clip=1.0, host_slots=...), batches, lr)
    trainer.initialise()
    issued = trainer.step(1)                            # Python goes on; the device follows
    issued.done.wait(); issued.loss, issued.grad_norm

With updates in the next step's forward pass the last gradients are pending when a step is done; `flush_updates` applies
them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.outofcore_support import disk_misfit
from llmb.config.offload_plan import Plan
from llmb.errors import ConfigError
from llmb.offload.arena import UNLIMITED, Arena, Budgets
from llmb.offload.bucket_params import init_bucket_weights
from llmb.offload.buffer_views import offload_dtypes
from llmb.offload.chunked_batches import ChunkedBatches
from llmb.offload.cuda_streams import StreamEvent, Streams, create_streams
from llmb.offload.disk.disk_tier import DiskTier
from llmb.offload.executor import Compute, Executor, StreamObserver
from llmb.offload.hf_import import load_hf_buckets
from llmb.offload.lora.adapter_state import AdamStep, AdapterState
from llmb.offload.lora.frozen_weights import StoredTensor
from llmb.offload.pinned_memory import HostSlab
from llmb.offload.step_programs import ProgramCache, StepRequest
from llmb.offload.task_compute import StepStats, TaskRunner
from llmb.perfmodel.offload.buffers import BufferKey, ParamBuckets
from llmb.perfmodel.offload.plan_memory import disk_bytes
from llmb.perfmodel.offload.program import Operation, Program
from llmb.perfmodel.offload.step_tasks import StepStart

Next = Literal["step", "flush", "nothing"]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of a run besides its plan."""

    seed: int
    clip: float | None = None  # maximum gradient norm; none: no clipping
    budgets: Budgets = UNLIMITED
    host_slots: dict[str, int]  # for gradients and activations, by kind
    disk_path: str | None = None  # folder for the buckets that live on disk


@dataclass(frozen=True)
class IssuedStep:
    """A step that was issued to the device."""

    number: int
    done: StreamEvent
    stats: Tensor  # on the host; valid once the step is done

    @property
    def loss(self) -> float:
        return float(self.stats[0])

    @property
    def grad_norm(self) -> float:
        """Norm before clipping."""
        return float(self.stats[1])


class Trainer:
    """Trainer of one model with one plan on one device."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        device: torch.device,
        settings: TrainerSettings,
        batches: ChunkedBatches,
        lr: Callable[[int], float],
        host_slab: HostSlab | None = None,
        streams: Streams | None = None,
    ):
        """`lr(number)`: learning rate of an update; these are counted from 1 as steps are."""
        self.model, self.plan, self.batches, self.lr, self.seed = model, plan, batches, lr, settings.seed
        self.programs, self.dtypes = ProgramCache(model, plan), offload_dtypes(plan)
        folder = _disk_folder(model, plan, settings.disk_path)  # before memory is pinned, which takes long
        self.arena = Arena(model, plan, device, settings.host_slots, settings.budgets, host_slab)
        self.disk = None if folder is None else DiskTier(folder, self.programs.on_disk, self.arena.sizes, device)
        self.streams = create_streams(device) if streams is None else streams
        self.executor = Executor(self.arena, self.streams, self.disk)
        self.stats = StepStats(device, settings.clip)
        self.runner = TaskRunner(model, plan, self.arena, self.stats, batches.rope_rows, settings.seed)
        self.start = StepStart(updates=0, pending=False)

    def initialise(self, folder: Path | None = None) -> None:
        """Initialise the weights as ordinary training does, or load them from a folder in Hugging Face's layout.

        Adapters come last, since their memory serves as scratch before.
        """
        if folder is None:
            init_bucket_weights(self.model, self.seed, self.edit_tensors, self.arena.scratch)
        else:
            load_hf_buckets(folder, self.model, self.edit_tensors, self.arena.device)
        if self.adapters is not None:
            self.adapters.initialise(self.seed)

    def resume(self, updates: int, scales: Mapping[str, Tensor] | None = None) -> None:
        """Continue after so many updates, with the fp8 `scales` of then; if none are given they are measured anew.

        Weights and optimizer state are set by the caller, through `edit_state`.
        """
        self.programs.with_state()
        if self.runner.fp8 is not None and scales is not None:
            self.runner.fp8.scales.load_state_dict(scales)
        self.start = StepStart(updates, pending=False)

    def step(
        self,
        number: int,
        followed_by: Next = "step",
        observer: StreamObserver | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> IssuedStep:
        """Issue a step; what follows it decides what stays on the device."""
        start_after = self._start_after_step()
        program = self.programs.next(StepRequest(self.start), self._request(start_after, followed_by))
        groups = self.batches.step(number)
        stats = torch.empty(2, pin_memory=self.arena.device.type == "cuda")
        compute = self._with_stats(program, self.runner.bind(groups, self._update), groups[0].num_labels, stats)
        self.executor.run(program, compute, observer, poll)
        self.start = start_after
        return IssuedStep(number, self.streams.record_event("compute"), stats)

    def flush_updates(self, followed_by: Next = "step") -> None:
        """Apply the pending updates, and wait for everything."""
        if self.start.pending:
            start_after = StepStart(self.start.updates + 1, pending=False)
            request = StepRequest(self.start, only_updates=True)
            program = self.programs.next(request, self._request(start_after, followed_by))
            self.executor.run(program, self.runner.bind((), self._update))
            self.start = start_after
        self.wait()

    def wait(self) -> None:
        """Wait for everything that was issued."""
        self.streams.wait()
        if self.disk is not None:
            self.disk.wait()

    def weights_of(self, bucket: int) -> Tensor:
        """Return a bucket's weights as elements, where they are now, or read from disk; the device must be idle."""
        with self.edit_weights(bucket, write=False) as weights:
            return weights

    def bucket_state(self, bucket: int) -> dict[str, Tensor]:
        """Return a bucket's weights and optimizer state as elements, likewise."""
        with self.edit_state(bucket, write=False) as tensors:
            return tensors

    @contextmanager
    def edit_weights(self, bucket: int, write: bool = True) -> Iterator[Tensor]:
        """Yield a bucket's weights as `weights_of` does; changes are written back, to the disk too."""
        with self._bytes(BufferKey("param", bucket), write) as weights:
            yield self.dtypes.weights(weights)

    @contextmanager
    def edit_tensors(self, bucket: int, write: bool = True) -> Iterator[list[StoredTensor]]:
        """Yield the tensors of a bucket's weights, likewise; frozen matrices may be in fp8."""
        with self._bytes(BufferKey("param", bucket), write) as weights:
            yield self.dtypes.stored(weights, ParamBuckets(self.model).tensors(bucket))

    @contextmanager
    def edit_state(self, bucket: int, write: bool = True) -> Iterator[dict[str, Tensor]]:
        """Yield a bucket's weights and optimizer state as `bucket_state` does; changes are written back."""
        with self.edit_weights(bucket, write) as weights, self._bytes(BufferKey("state", bucket), write) as data:
            state = self.dtypes.state(data)
            tensors = {"param": weights, "low": state.low, "m": state.m, "v": state.v}
            yield {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @contextmanager
    def _bytes(self, key: BufferKey, write: bool) -> Iterator[Tensor]:
        """Yield a bucket's weights or state as bytes; what was read from disk is written back."""
        buffer = self.programs.buffer_of(key)
        if buffer is not None:
            yield self.arena.buffer(key.kind, buffer)
        elif self.disk is None or key not in self.disk:
            yield self.arena.host_slot(key.kind, self.programs.host_slot_of(key))
        else:
            memory = self.disk.load(key)
            yield memory[: self.arena.sizes[key.kind]]
            if write:
                self.disk.store(key, memory)

    @property
    def adapters(self) -> AdapterState | None:
        """LoRA adapters; none: all weights are trained."""
        return self.runner.adapters

    @property
    def scales(self) -> dict[str, Tensor] | None:
        """State of the fp8 scales; none in other dtypes, and of recipes that keep none. The device must be idle."""
        return None if self.runner.fp8 is None else self.runner.fp8.scales.state_dict() or None

    @property
    def buckets(self) -> range:
        return range(ParamBuckets(self.model).count)

    @property
    def host_bytes(self) -> int:
        """Host memory, staging buffers included."""
        return self.arena.host_bytes + (0 if self.disk is None else self.disk.staging_bytes)

    @property
    def _update(self) -> AdamStep:
        number = self.start.updates + 1
        return AdamStep(number, self.lr(number))

    def _start_after_step(self) -> StepStart:
        if self.plan.update_at == "forward":
            return StepStart(self.start.updates + self.start.pending, pending=True)
        return StepStart(self.start.updates + 1, pending=False)

    def _request(self, start: StepStart, kind: Next) -> StepRequest | None:
        if kind == "nothing" or (kind == "flush" and not start.pending):
            return None
        return StepRequest(start, only_updates=kind == "flush")

    def _with_stats(self, program: Program, compute: Compute, num_labels: int, out: Tensor) -> Compute:
        """Wrap `compute`: reset the stats before the first task, and copy them to the host after the last."""
        first, last = program.operations[0], program.operations[-1]

        def compute_with_stats(operation: Operation) -> None:
            if operation is first:
                self.stats.reset()
            compute(operation)
            if operation is last:
                self.stats.finish(num_labels, out)

        return compute_with_stats


def _disk_folder(model: Model, plan: Plan, disk_path: str | None) -> Path | None:
    """Return the folder of a plan's buckets on disk, if it has any; refused where they cannot be there."""
    if not plan.uses_disk:
        return None
    line = disk_misfit(disk_path, sum(disk_bytes(model, plan).values()))
    if line is not None or disk_path is None:
        raise ConfigError(line)
    return Path(disk_path)
