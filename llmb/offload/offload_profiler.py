"""Profiler of all streams in the requested steps: writes profile/lanes.json, from which pictures and traces are made.

    recorder = StreamRecorder(model, plan, streams)
    executor.run(program, compute, observer=recorder.observer(step))
    write_timeline(path, recorder.timeline(...))        # once all is done

Times are those of the device's events, recorded on the stream itself: before an entry, when its waits are over, and
behind it. Transfers of a disk have the host's clock, which is compared with the device's at the end. Under Nsight
Systems its capture range is opened and closed around the same steps instead.
"""

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import LaunchError
from llmb.offload.cuda_streams import HostEvent, StreamEvent, Streams
from llmb.offload.executor import StreamObserver
from llmb.offload.trainer import Trainer
from llmb.perfmodel.hardware import TERA, peak_flops
from llmb.perfmodel.offload.buffers import buffer_bytes, bytes_on_disk
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU
from llmb.perfmodel.offload.program import Copy
from llmb.perfmodel.offload.simulator import timeline_event
from llmb.perfmodel.offload.step_tasks import StepTask
from llmb.perfmodel.offload.stream_timeline import (
    DISK_STREAMS,
    MemoryUse,
    StreamName,
    StreamTimeline,
    TimelineEvent,
    write_timeline,
)
from llmb.perfmodel.offload.task_durations import TaskDurations
from llmb.runtime.profile_window import NsightWindow, is_under_nsight, profiled_steps


class StreamProfiler:
    """Call `before` each step, which returns the observer for it, and `after` it."""

    def __init__(self, folder: Path, config: RunConfig, workload: OutOfCore, steps: range, trainer: Trainer):
        self._folder, self._config, self._workload, self._trainer = folder / "profile", config, workload, trainer
        self._steps = profiled_steps(config.profile, steps)
        self._nsight = NsightWindow(self._steps) if is_under_nsight() else None
        self._recorder: StreamRecorder | None = None

    def before(self, step: int) -> StreamObserver | None:
        """Return the observer of the step's entries, if it is profiled."""
        if self._nsight is not None:
            self._nsight.before(step)
            return None
        if step not in self._steps:
            return None
        if self._recorder is None:
            self._recorder = StreamRecorder(self._trainer.model, self._trainer.plan, self._trainer.streams)
        return self._recorder.observer(step)

    def after(self, step: int) -> bool:
        """Write the file after the last profiled step; returns whether the step was it, whose time is not a step's."""
        if self._nsight is not None:
            self._nsight.after(step)
        elif self._recorder is not None and step == self._steps[-1]:
            self._write(self._recorder)
            self._recorder = None
        return bool(self._steps) and step == self._steps[-1]

    def _write(self, recorder: "StreamRecorder") -> None:
        self._trainer.wait()
        peak = peak_flops(self._config.machine.gpu, self._config.precision.dtype)
        peak_tflops = None if peak is None else peak / TERA
        used = self._trainer.arena.device_bytes, self._trainer.host_bytes
        timeline = recorder.timeline(*used, peak_tflops, self._link())
        path = self._folder / "lanes.json"
        try:
            self._folder.mkdir(exist_ok=True)
            write_timeline(path, timeline)
        except OSError as error:
            raise LaunchError(f"cannot write {path}: {error.strerror}") from error

    def _link(self) -> tuple[float, float] | None:
        """Bandwidth of the link, where it was measured."""
        prediction = self._workload.prediction
        if prediction is None or prediction.step_s is None:
            return None
        return prediction.rates["link_in_gbs"], prediction.rates["link_out_gbs"]


class _Entry(NamedTuple):
    step: int
    stream: StreamName
    task: StepTask
    copy: Copy | None
    start: StreamEvent
    end: StreamEvent


class StreamRecorder:
    """Entries of all streams, measured from the moment when it is created."""

    def __init__(self, model: Model, plan: Plan, streams: Streams):
        self._streams, self._began = streams, streams.record_event("compute")
        self._sizes = buffer_bytes(model, plan)
        self._durations = TaskDurations(model, plan, NOMINAL_CPU)  # for FLOPs, which depend on no rate
        self._entries: list[_Entry] = []

    def observer(self, step: int) -> StreamObserver:
        """Return an observer that records the entries of a step."""
        return partial(self._add, step)

    def _add(
        self, step: int, stream: StreamName, task: StepTask, copy: Copy | None, start: StreamEvent, end: StreamEvent
    ) -> None:
        self._entries.append(_Entry(step, stream, task, copy, start, end))

    def timeline(
        self, device_bytes: int, host_bytes: int, peak_tflops: float | None, link_gbs: tuple[float, float] | None
    ) -> StreamTimeline:
        """Return the timeline, once all entries are done."""
        now = self._streams.record_event("compute")
        now.wait()
        began = time.perf_counter() - self._began.elapsed_s(now)  # by the host's clock
        events = tuple(self._event(entry, began) for entry in self._entries)
        memory = [
            MemoryUse(time=time, device_bytes=device_bytes, host_bytes=host_bytes)
            for time in (0.0, max((event.end for event in events), default=0.0))
        ]  # nothing is allocated or freed in between
        return StreamTimeline(
            source="measured", events=events, memory=tuple(memory), link_gbs=link_gbs, peak_tflops=peak_tflops
        )

    def _event(self, entry: _Entry, began: float) -> TimelineEvent:
        start, end = (
            event.time - began if isinstance(event, HostEvent) else self._began.elapsed_s(event)
            for event in (entry.start, entry.end)
        )
        copy = entry.copy
        size = 0 if copy is None else self._sizes[copy.key.kind]
        return timeline_event(
            entry.stream,
            entry.task.kind if copy is None else copy.key.kind,
            start,
            end,
            entry.task,
            entry.step,
            self._durations.model.layers,
            size=bytes_on_disk(size) if entry.stream in DISK_STREAMS else size,
            flops=self._durations.cost(entry.task).flops if copy is None else 0.0,
            key=None if copy is None else copy.key,
        )
