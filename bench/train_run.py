"""The engine itself, `llmb.train.loop.train`, or the one for less memory, in this process: as many steps as count, then
some under a profiler.

What it records after each step says how long that took, and is where the run is ended: there is no second training loop
here. Steps of the first seconds do not count, in which kernels are compiled and chosen and clocks settle.
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

from llmb.events import StepDone
from llmb.outofcore.loop import train as train_out_of_core
from llmb.rank.record import Fact, Record
from llmb.spec import OutOfCore, RunConfig
from llmb.train.loop import train

PROFILED = 1  # steps, after one in which the tracing library gets used to its work


@dataclass(frozen=True, kw_only=True)
class Order:
    """How long a row is trained."""

    settling_s: float  # after the first step
    steps: int  # that count, at most
    fewest: int  # however long they take
    seconds: float  # of counting, after which no further step is begun
    profile: bool


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a row's steps came to."""

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


class Watch(Record):
    """Counts the steps, opens and closes the profiler between two of them, and ends the run."""

    def __init__(self, folder: Path, order: Order, device: torch.device):
        super().__init__(folder, 0)
        self._order, self._device = order, device
        self._began = time.perf_counter()
        self._first: float | None = None  # when the first step was done
        self._counting_since: float | None = None
        self.steps: list[StepDone] = []
        self.counted: list[float] = []
        self.first_s = 0.0
        self._trace: profile | None = None
        self._profiled = 0
        self.events: list[dict[str, Any]] = []

    def add(self, event: Fact) -> None:
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
        elif self._counting_since is not None:
            self.counted.append(event.seconds)
        if self._counting_since is None and now - self._first >= self._order.settling_s:
            self._counting_since = now
        if self._trace is None and self._is_enough(now):
            if not self._order.profile:
                raise Enough
            self._start_profile()

    def _is_enough(self, now: float) -> bool:
        counted = len(self.counted)
        late = self._counting_since is not None and now - self._counting_since >= self._order.seconds
        return counted >= self._order.steps or (late and counted >= self._order.fewest)

    def _start_profile(self) -> None:
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
            engine = train_out_of_core if isinstance(config.workload, OutOfCore) else train
            engine(config, watch)
    return Trained(
        first_s=watch.first_s,
        seconds=watch.counted,
        losses=[step.loss for step in watch.steps],
        memory_bytes=max(step.memory_bytes for step in watch.steps),
        trace=watch.events,
    )
