"""One row of `outofcore_gpu.py`: a trainer on synthetic tokens, some steps, and what they took.

Steps are issued one behind the other, as in a long run; the device's own events say when each ended. Entries of all
streams are recorded in the last step: two events each, at no measurable cost.
"""

import math
import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from llmb.config.model import Model
from llmb.offload.arena import Budgets
from llmb.offload.chunked_batches import ChunkedBatches
from llmb.offload.offload_profiler import StreamRecorder
from llmb.offload.pinned_memory import HostSlab
from llmb.offload.trainer import Trainer, TrainerSettings
from llmb.perfmodel.offload.plan_candidate import PlanResult
from llmb.perfmodel.offload.stream_timeline import StreamName, StreamTimeline

SEED = 1234
LR = 3e-6  # ten times as much makes the loss of 8b jump in its third step: all weights of 32 layers go one way at first
NEAR = 1.0  # of ln(vocabulary), where a loss of random weights is


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Measurements of a row's steps."""

    opening_s: float  # memory, weights
    warm_up_s: float | None  # of the step that does not count; none: the first one counts
    seconds: list[float]  # of each step that counts
    losses: list[float]  # of all steps
    sound: bool  # losses are finite, and fall or are near what they must be at first
    waited: float  # share of the last step in which nothing was computed
    link: dict[str, float]  # share of it in which something was copied, each way
    host_bytes: int
    device_bytes: int  # the most that torch held
    driver_bytes: int | None  # all that was taken of the device, the driver's own included; none: a CPU
    streams: StreamTimeline  # of the steps watched

    @property
    def step_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Order:
    """Settings of the measurement of a row."""

    budgets: Budgets
    warm_up: int  # steps that do not count
    steps: int  # that count
    watch_all: bool  # of these; else the last
    link_gbs: tuple[float, float]
    peak_tflops: float | None
    disk_path: str | None = None  # for a plan that keeps buckets on disk


def train(model: Model, result: PlanResult, order: Order, device: torch.device, slab: HostSlab) -> Trained:
    """Open a trainer, run its steps, return the measurements; the caller releases all memory but the slab."""
    began = time.perf_counter()
    trainer = _opened(model, result, order, device, slab)
    opening_s = time.perf_counter() - began
    total = order.steps + order.warm_up
    start = trainer.streams.record_event("compute")
    record = StreamRecorder(model, result.plan, trainer.streams)
    watched = range(order.warm_up + 1 if order.watch_all else total, total + 1)
    issued = [trainer.step(n, observer=record.observer(n) if n in watched else None) for n in range(1, total + 1)]
    trainer.wait()
    ends = [start, *(entry.done for entry in issued)]
    seconds = [before.elapsed_s(end) for before, end in pairwise(ends)]
    losses = [entry.loss for entry in issued]
    arena = trainer.arena
    streams = record.timeline(arena.device_bytes, trainer.host_bytes, order.peak_tflops, order.link_gbs)
    return Trained(
        opening_s=opening_s,
        warm_up_s=seconds[0] if order.warm_up else None,
        seconds=seconds[order.warm_up :],
        losses=losses,
        sound=_sound(losses, model.vocab),
        waited=1 - _busy(streams, "compute", total) / seconds[-1],
        link={stream: _busy(streams, stream, total) / seconds[-1] for stream in ("inbound", "outbound")},
        host_bytes=trainer.host_bytes,
        device_bytes=arena.device_bytes,
        driver_bytes=_taken(device),
        streams=streams,
    )


def _opened(model: Model, result: PlanResult, order: Order, device: torch.device, slab: HostSlab) -> Trainer:
    batches = ChunkedBatches(model, result.plan, SEED, None, False, device)
    settings = TrainerSettings(
        seed=SEED, budgets=order.budgets, host_slots=result.simulation.host_slots, disk_path=order.disk_path
    )
    trainer = Trainer(model, result.plan, device, settings, batches, lambda _: LR, slab)
    trainer.initialise()
    trainer.streams.wait()
    return trainer


def _busy(streams: StreamTimeline, stream: StreamName, step: int) -> float:
    return sum(entry.end - entry.start for entry in streams.events if entry.stream == stream and entry.step == step)


def _taken(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _sound(losses: list[float], vocab: int) -> bool:
    if not all(map(math.isfinite, losses)):
        return False
    falls = len(losses) > 1 and losses[-1] < losses[0]
    return falls or abs(losses[-1] - math.log(vocab)) < NEAR
