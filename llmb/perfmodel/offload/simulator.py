"""Simulation of a program on three streams that wait for one another as CUDA streams do, and on a disk's two.

    simulation = simulate(model, plan, rates)     # a step in the middle of a long run
    simulation.step_s, simulation.compute_s, simulation.events

Of a step of many equal rounds only the first, one in the middle and the last are simulated; the others are like the
second.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmb.config.model import Model
from llmb.config.offload_plan import FULL, Plan
from llmb.perfmodel.offload.buffers import (
    BUCKET_KINDS,
    DISK_KINDS,
    STAGING_BUFFERS,
    BufferKey,
    buffer_bytes,
    bytes_on_disk,
)
from llmb.perfmodel.offload.machine_rates import Rates
from llmb.perfmodel.offload.program import Copy, Operation, Program
from llmb.perfmodel.offload.residency import Residency
from llmb.perfmodel.offload.step_tasks import StepTask, step_start, step_tasks
from llmb.perfmodel.offload.stream_timeline import DISK_STREAMS, STREAMS, Phase, StreamName, TimelineEvent
from llmb.perfmodel.offload.task_durations import TaskDurations

SHOWN_ROUNDS = 3
PHASES: dict[str, Phase] = {
    "embedding": "embedding", "embedding_backward": "embedding",
    "forward": "forward", "head": "head", "backward": "backward", "update": "update",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Predicted step in the middle of a run."""

    step_s: float
    compute_s: float  # of these, in which the compute stream was busy
    inbound_s: float
    outbound_s: float
    inbound_bytes: int
    outbound_bytes: int
    disk_read_s: float
    disk_write_s: float
    disk_read_bytes: int
    disk_write_bytes: int
    hardware_flops: float
    host_slots: dict[str, int]  # that gradients and activations need, by kind
    events: tuple[TimelineEvent, ...]  # of the simulated rounds, if requested


class StreamClocks:
    """Clock of each stream, and when each entry of the current program was done."""

    def __init__(self, durations: TaskDurations, sizes: dict[str, int]):
        self.durations, self.sizes, rates = durations, sizes, durations.rates
        read_gbs, write_gbs, disk_gbs = rates.disk_gbs
        # Opposite stream, and GB/s alone and when both are busy.
        self.directions: dict[StreamName, tuple[StreamName, float, float]] = {
            "inbound": ("outbound", rates.link_in_gbs, rates.link_both_gbs),
            "outbound": ("inbound", rates.link_out_gbs, rates.link_both_gbs),
            "disk_read": ("disk_write", read_gbs, disk_gbs),
            "disk_write": ("disk_read", write_gbs, disk_gbs),
        }
        self.now: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
        self.done: dict[str, list[float]] = {stream: [] for stream in STREAMS}
        self.base = dict.fromkeys(self.now, 0)
        # When each staging buffer is free again, of those for reads and of those for writes, in the order of their use.
        self.read_buffers, self.write_buffers = (
            {kind: deque([0.0] * STAGING_BUFFERS) for kind in DISK_KINDS} for _ in range(2)
        )
        self.written: dict[BufferKey, float] = {}  # when a bucket's file was

    def run(self, program: Program, step: int = 0) -> Iterator[TimelineEvent]:
        """Yield every entry of a program, in order, with its start and end."""
        self.base = {stream: len(done) for stream, done in self.done.items()}
        for copy in program.first_copies_out:
            yield from self._copy_out(copy, program.operations[0].task, step)
        for operation in program.operations:
            for copy in operation.copies_in:
                yield from self._copy_in(copy, operation.task, step)
            yield from self._compute(operation, step)
            for copy in operation.copies_out:
                yield from self._copy_out(copy, operation.task, step)

    def _compute(self, operation: Operation, step: int) -> Iterator[TimelineEvent]:
        """Yield the event of a task; its recomputation is an event of its own."""
        task, cost = operation.task, self.durations.cost(operation.task)
        ready = max(self._done("inbound", operation.wait_inbound), self._done("outbound", operation.wait_outbound))
        start, end = self._take("compute", ready, self.durations.seconds_of(cost))
        segments: list[tuple[str, float, float, float]] = [(task.kind, start, end, cost.flops)]
        if task.kind == "backward" and task.level != FULL and task.chunk is not None:
            recompute = self.durations.recompute(task.chunk, task.level)
            split = start + self.durations.seconds_of(recompute)
            segments = [
                ("recompute", start, split, recompute.flops),
                (task.kind, split, end, cost.flops - recompute.flops),
            ]
        for name, begin, stop, flops in segments:
            yield timeline_event("compute", name, begin, stop, task, step, self.durations.model.layers, flops=flops)

    def _copy_in(self, copy: Copy, task: StepTask, step: int) -> Iterator[TimelineEvent]:
        key, ready = copy.key, max(self._done("compute", copy.wait_compute), self._done("outbound", copy.wait_other))
        if not copy.is_staged:
            yield self._transfer("inbound", key, ready, task, step)
            return
        buffers = self.read_buffers[key.kind]
        read = self._transfer("disk_read", key, max(buffers.popleft(), self.written.get(key, 0.0)), task, step)
        yield read
        event = self._transfer("inbound", key, max(ready, read.end), task, step)
        yield event
        buffers.append(event.end)

    def _copy_out(self, copy: Copy, task: StepTask, step: int) -> Iterator[TimelineEvent]:
        key, ready = copy.key, max(self._done("compute", copy.wait_compute), self._done("inbound", copy.wait_other))
        if not copy.is_staged:
            yield self._transfer("outbound", key, ready, task, step)
            return
        buffers = self.write_buffers[key.kind]
        event = self._transfer("outbound", key, max(ready, buffers.popleft()), task, step)
        yield event
        write = self._transfer("disk_write", key, event.end, task, step)
        yield write
        self.written[key] = write.end
        buffers.append(write.end)

    def _transfer(self, stream: StreamName, key: BufferKey, ready: float, task: StepTask, step: int) -> TimelineEvent:
        size = self.sizes[key.kind]
        size = bytes_on_disk(size) if stream in DISK_STREAMS else size
        opposite, alone_gbs, both_gbs = self.directions[stream]
        is_busy = self.now[opposite] > max(ready, self.now[stream])  # slower when both directions are
        start, end = self._take(stream, ready, size / (both_gbs if is_busy else alone_gbs) / 1e9)
        return timeline_event(stream, key.kind, start, end, task, step, self.durations.model.layers, size, key=key)

    def _done(self, stream: StreamName, entry: int) -> float:
        index = self.base[stream] + entry
        return self.done[stream][index] if index >= 0 else 0.0

    def _take(self, stream: StreamName, ready: float, seconds: float) -> tuple[float, float]:
        start = max(self.now[stream], ready)
        self.now[stream] = start + seconds
        self.done[stream].append(self.now[stream])
        return start, self.now[stream]


def timeline_event(
    stream: StreamName, name: str, start: float, end: float, task: StepTask, step: int, layers: int,
    size: int = 0, flops: float = 0.0, key: BufferKey | None = None,
) -> TimelineEvent:  # fmt: skip
    """Return the event of a stream's entry, predicted or measured. A vocabulary shard has no layer."""
    layer, chunk = task.layer, task.chunk
    if key is not None and key.kind in BUCKET_KINDS:
        layer, chunk = key.layer, None
    return TimelineEvent(
        stream=stream, name=name, start=start, end=end, step=step, phase=PHASES[task.kind], round=task.round,
        layer=layer if 0 <= layer < layers else None,
        group=chunk.group if chunk else None, chunk=chunk.number if chunk else None, flops=flops, bytes=size,
    )  # fmt: skip


def simulate(model: Model, plan: Plan, rates: Rates, with_events: bool = False) -> SimulationResult:
    """Simulate the third step, which is like all behind it: the first has no pending gradients, the second no state.

    These two have one round, which leaves the same state behind as many.
    """
    rounds = min(plan.rounds, SHOWN_ROUNDS)
    shortened, one_round = plan, plan
    if plan.rounds > SHOWN_ROUNDS:
        shortened = replace(plan, gbs=SHOWN_ROUNDS * plan.groups_per_round * plan.seqs_per_group)
    if plan.rounds > 1:
        one_round = replace(plan, gbs=plan.groups_per_round * plan.seqs_per_group)
    residency = Residency(model, shortened)
    streams = StreamClocks(TaskDurations(model, shortened, rates), buffer_bytes(model, shortened))
    steady_tasks = step_tasks(model, shortened, step_start(plan, 2))
    for step in (0, 1):
        for _ in streams.run(residency.program(step_tasks(model, one_round, step_start(plan, step)), steady_tasks)):
            pass
    start = streams.now["compute"]
    program = residency.program(steady_tasks, steady_tasks)
    events = list(streams.run(program))
    end = streams.now["compute"]
    round_totals = _RoundTotals(rounds)
    for event in events:
        round_totals.add(event)
    repeats = plan.rounds - rounds  # how many middle rounds were not simulated
    middle_s = round_totals.ends[1] - round_totals.ends[0] if rounds > 1 else 0.0
    if with_events:  # one more, to show the boundary between two steps
        events += streams.run(residency.program(steady_tasks, steady_tasks), step=1)
    return SimulationResult(
        step_s=end - start + repeats * middle_s,
        compute_s=round_totals.total("compute", repeats),
        inbound_s=round_totals.total("inbound", repeats),
        outbound_s=round_totals.total("outbound", repeats),
        inbound_bytes=int(round_totals.total("inbound_bytes", repeats)),
        outbound_bytes=int(round_totals.total("outbound_bytes", repeats)),
        disk_read_s=round_totals.total("disk_read", repeats),
        disk_write_s=round_totals.total("disk_write", repeats),
        disk_read_bytes=int(round_totals.total("disk_read_bytes", repeats)),
        disk_write_bytes=int(round_totals.total("disk_write_bytes", repeats)),
        hardware_flops=round_totals.total("flops", repeats),
        host_slots=program.host_slots,
        events=tuple(_shifted(event, start) for event in events) if with_events else (),
    )


def _shifted(event: TimelineEvent, start: float) -> TimelineEvent:
    return replace(event, start=event.start - start, end=event.end - start)


class _RoundTotals:
    """Totals of each round by name, and the end of its last task."""

    def __init__(self, rounds: int):
        self.totals: list[dict[str, float]] = [{} for _ in range(rounds)]
        self.ends = [0.0] * rounds

    def add(self, event: TimelineEvent) -> None:
        assert event.round is not None
        totals = self.totals[event.round]
        seconds = event.end - event.start
        for name, value in (
            (event.stream, seconds), (f"{event.stream}_bytes", event.bytes), ("flops", event.flops),
        ):  # fmt: skip
            totals[name] = totals.get(name, 0.0) + value
        if event.stream == "compute":
            self.ends[event.round] = event.end

    def total(self, name: str, repeats: int) -> float:
        values = [totals.get(name, 0.0) for totals in self.totals]
        return sum(values) + (repeats * values[1] if repeats else 0.0)
