"""Watches all lanes in the asked steps and leaves profile/lanes.json, from which pictures and traces are made.

Where Nsight Systems watches instead (rank/nsight.py), its window is opened and closed around the same steps.
"""

from pathlib import Path

from llmb.config.spec import OutOfCore, RunConfig
from llmb.errors import LaunchError
from llmb.offload.executor import Watch
from llmb.offload.stream_recorder import LaneRecord
from llmb.offload.trainer import Trainer
from llmb.perfmodel.hardware import TERA, peak_flops
from llmb.perfmodel.offload.stream_timeline import write_lanes
from llmb.runtime.nsight_window import NsightWindow, watched_by_nsight
from llmb.runtime.profile_window import profiled_steps


class Profiler:
    """Call `before` each step, which gives the watch to take it with, and `after` it."""

    def __init__(self, folder: Path, config: RunConfig, work: OutOfCore, steps: range, trainer: Trainer):
        self._folder, self._config, self._work, self._trainer = folder / "profile", config, work, trainer
        self._steps = profiled_steps(config.profile, steps)
        self._nsight = NsightWindow(self._steps) if watched_by_nsight() else None
        self._record: LaneRecord | None = None

    def before(self, step: int) -> Watch | None:
        """What is to be told of the step's entries; none: nothing."""
        if self._nsight is not None:
            self._nsight.before(step)
            return None
        if step not in self._steps:
            return None
        if self._record is None:
            began = self._trainer.lanes.moment("compute")
            self._record = LaneRecord(self._trainer.model, self._trainer.plan, began)
        return self._record.watch(step)

    def after(self, step: int) -> bool:
        """Behind the last of them: wait for all lanes, and write. Whether it did: that is no step's time."""
        if self._nsight is not None:
            self._nsight.after(step)
        elif self._record is not None and step == self._steps[-1]:
            self._write(self._record)
            self._record = None
        return bool(self._steps) and step == self._steps[-1]

    def _write(self, record: LaneRecord) -> None:
        self._trainer.lanes.wait()
        peak = peak_flops(self._config.machine.gpu, self._config.precision.dtype)
        arena = self._trainer.arena
        lanes = record.lanes(arena.device_bytes, arena.host_bytes, None if peak is None else peak / TERA, self._link())
        path = self._folder / "lanes.json"
        try:
            self._folder.mkdir(exist_ok=True)
            write_lanes(path, lanes)
        except OSError as error:
            raise LaunchError(f"cannot write {path}: {error.strerror}") from error

    def _link(self) -> tuple[float, float] | None:
        """What it can do, where anybody has measured that."""
        expected = self._work.prediction
        if expected is None or expected.step_s is None:
            return None
        return expected.rates["link_in_gbs"], expected.rates["link_out_gbs"]
