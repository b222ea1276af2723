"""What every lane did in some steps, and when: the measured side of `llmb/perfmodel/offload/stream_timeline.py`.

    record = LaneRecord(model, plan, began)
    executor.follow(program, compute, watch=record.watch(step))
    write_lanes(path, record.lanes(...))        # once all is done

Times are those of the device's own events, taken on the lane itself: before an entry, when its waits are over, and
behind it.
"""

from functools import partial
from typing import NamedTuple

from llmb.config.offload_plan import Plan
from llmb.config.spec import Model
from llmb.offload.cuda_streams import Moment
from llmb.offload.executor import Watch
from llmb.perfmodel.offload.buffers import piece_bytes
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU
from llmb.perfmodel.offload.program import Copy
from llmb.perfmodel.offload.simulator import stretch_of
from llmb.perfmodel.offload.step_tasks import Work
from llmb.perfmodel.offload.stream_timeline import Lane, Lanes, MemoryUse, Stretch
from llmb.perfmodel.offload.task_durations import Durations


class _Entry(NamedTuple):
    step: int
    lane: Lane
    work: Work
    copy: Copy | None
    start: Moment
    end: Moment


class LaneRecord:
    """Entries of all lanes, measured from one moment on."""

    def __init__(self, model: Model, plan: Plan, began: Moment):
        self._began = began
        self._sizes = piece_bytes(model, plan)
        self._durations = Durations(model, plan, NOMINAL_CPU)  # for FLOPs, which depend on no rate
        self._entries: list[_Entry] = []

    def watch(self, step: int) -> Watch:
        """Notes the entries of a step."""
        return partial(self._add, step)

    def _add(self, step: int, lane: Lane, work: Work, copy: Copy | None, start: Moment, end: Moment) -> None:
        self._entries.append(_Entry(step, lane, work, copy, start, end))

    def lanes(
        self, device_bytes: int, host_bytes: int, peak_tflops: float | None, link_gbs: tuple[float, float] | None
    ) -> Lanes:
        """All of them, once they are over."""
        stretches = tuple(self._stretch(entry) for entry in self._entries)
        memory = [
            MemoryUse(time=time, device_bytes=device_bytes, host_bytes=host_bytes)
            for time in (0.0, max((stretch.end for stretch in stretches), default=0.0))
        ]  # nothing is taken or given back in between
        return Lanes(
            source="measured",
            stretches=stretches,
            memory=tuple(memory),
            link_gbs=link_gbs,
            peak_tflops=peak_tflops,
        )

    def _stretch(self, entry: _Entry) -> Stretch:
        start, end = (self._began.seconds_until(moment) for moment in (entry.start, entry.end))
        copy = entry.copy
        return stretch_of(
            entry.lane,
            entry.work.kind if copy is None else copy.piece.kind,
            start,
            end,
            entry.work,
            entry.step,
            self._durations.model.layers,
            size=0 if copy is None else self._sizes[copy.piece.kind],
            flops=self._durations.cost(entry.work).flops if copy is None else 0.0,
            piece=None if copy is None else copy.piece,
        )
