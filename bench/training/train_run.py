"""The engine itself, `llmb.train.loop.train`, or the one for less memory, in this process: as many steps as count, then
some under a profiler.

What it records after each step says how long that took, and is where the run is ended: there is no second training loop
here. The first step does not count, in which kernels are compiled and chosen, nor those that end soon after it, while
clocks settle. Under the profiler every kernel is launched by itself: one of a CUDA graph does not say what called it.
"""

import json
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from llmb.config.spec import OutOfCore, RunConfig
from llmb.events import StepDone
from llmb.offload.offload_loop import train as train_out_of_core
from llmb.runtime.recorder import EventRecorder, RecordedEvent
from llmb.train.cuda_graphs import MicroBatchGraph
from llmb.train.loop import train

PROFILED = 1  # steps, after one in which the tracing library gets used to its work


@dataclass(frozen=True, kw_only=True)
class Order:
    """Settings of the measurement of a row."""

    settling_s: float  # after the first step, in which none that counts may end
    steps: int  # that count, at most
    fewest: int  # however long they take
    seconds: float  # from the first step on, after which no further one is begun
    profile: bool


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Measurements of the steps of a row."""

    first_s: float  # of the first step, from the beginning: weights, kernels
    seconds: list[float]  # of each step that counts
    losses: list[float | None]  # of all steps
    memory_bytes: int
    trace: list[dict[str, Any]] = field(default_factory=list, repr=False)  # of PROFILED steps, as Chrome has it

    @property
    def step_s(self) -> float:
        return median(self.seconds)


class Enough(Exception):
    """Ends a run that has measured what it was asked for."""


class Watch(EventRecorder):
    """Counts the steps, opens and closes the profiler between two of them, and ends the run."""

    def __init__(self, folder: Path, order: Order, device: torch.device):
        super().__init__(folder, 0)
        self._order, self._device = order, device
        self._began = time.perf_counter()
        self._first: float | None = None  # when the first step was done
        self.graph = MicroBatchGraph()
        self.steps: list[StepDone] = []
        self.counted: list[float] = []
        self.first_s = 0.0
        self._trace: profile | None = None
        self._profiled = 0
        self.events: list[dict[str, Any]] = []

    def add(self, event: RecordedEvent) -> None:
        """A step is done: what it means for the next."""
        super().add(event)
        if not isinstance(event, StepDone):
            return
        self.steps.append(event)
        now = time.perf_counter()
        if self._first is None:
            self._first, self.first_s = now, now - self._began
        elif self._trace is not None:
            self._profile_step()
        elif now - self._first >= self._order.settling_s:
            self.counted.append(event.seconds)
        if self._trace is None and self._is_enough(now - self._first):
            if not self._order.profile:
                raise Enough
            self._start_profile()

    def _is_enough(self, since_first: float) -> bool:
        counted, order = len(self.counted), self._order
        return counted >= order.steps or (since_first >= order.seconds and counted >= order.fewest)

    def _start_profile(self) -> None:
        self.graph.disable()
        on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._trace = profile(
            activities=[ProfilerActivity.CPU, *on_gpu], record_shapes=True,
            schedule=schedule(wait=0, warmup=1, active=PROFILED, repeat=1),
        )  # fmt: skip
        self._trace.start()

    def _profile_step(self) -> None:
        assert self._trace is not None
        self._profiled += 1
        if self._profiled <= PROFILED:
            self._trace.step()
            return
        self._trace.stop()
        path = self.path.with_name("trace.json")
        self._trace.export_chrome_trace(str(path))
        self.events = json.loads(path.read_text())["traceEvents"]
        raise Enough


def trained(config: RunConfig, order: Order, device: torch.device) -> Trained:
    """Train until the order is met; whatever the engine raises is the caller's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with TemporaryDirectory() as name:
        folder = Path(name)
        watch = Watch(folder, order, device)
        with (folder / "log").open("w") as log, redirect_stdout(log), suppress(Enough):
            if isinstance(config.workload, OutOfCore):
                train_out_of_core(config, watch)
            else:
                train(config, watch, watch.graph)
    return Trained(
        first_s=watch.first_s,
        seconds=watch.counted,
        losses=[step.loss for step in watch.steps],
        memory_bytes=max(step.memory_bytes for step in watch.steps),
        trace=watch.events,
    )
