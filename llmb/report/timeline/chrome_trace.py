"""Lanes as a Chrome trace, for chrome://tracing and Perfetto: every stretch, to be zoomed into.

    trace_bytes([measured, predicted]) -> the bytes of trace.json.gz

A process for each set of lanes, a thread for each lane and one for the named ranges, in which step, round, phase, layer
and chunk nest; counters of TFLOP/s, of GB/s in and out, and of memory. Times are microseconds, as the format has it.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from llmb.perfmodel.offload.stream_timeline import LANES, Lane
from llmb.report.timeline.named_ranges import LEVELS
from llmb.report.timeline.task_kinds import LANE_LABELS, kind
from llmb.report.timeline.tracks import Timeline

Event = dict[str, Any]
RANGES_THREAD = 1
THREADS: dict[Lane, int] = {lane: RANGES_THREAD + 1 + i for i, lane in enumerate(LANES)}


def trace_bytes(timelines: Sequence[Timeline]) -> bytes:
    """The whole trace, packed; without the time of packing, so that the same lanes give the same bytes."""
    events = [event for process, one in enumerate(timelines, start=1) for event in _events(one, process)]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def _events(timeline: Timeline, process: int) -> Iterator[Event]:
    yield from _names(timeline, process)
    yield from _ranges(timeline, process)
    for lane in LANES:
        yield from _work(timeline, lane, process)
        if timeline.counts(lane):
            yield from _rates(timeline, lane, process)
    for (time, device), (_, host) in zip(timeline.device_gib, timeline.host_gib, strict=True):
        yield _counter("memory GiB", time, {"device": round(device, 3), "host": round(host, 3)}, process)


def _names(timeline: Timeline, process: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.lanes.source}}
    threads = {"Ranges": RANGES_THREAD, **{LANE_LABELS[lane]: thread for lane, thread in THREADS.items()}}
    for name, thread in threads.items():
        where: Event = {"ph": "M", "pid": process, "tid": thread}
        yield {**where, "name": "thread_name", "args": {"name": name}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _ranges(timeline: Timeline, process: int) -> Iterator[Event]:
    """The widest first: of slices that begin together, a viewer takes the first for the outer one."""
    for level in LEVELS:
        for one in timeline.ranges[level]:
            yield _slice(one.labels[0], one.start, one.end, process, RANGES_THREAD, {"level": level})


def _work(timeline: Timeline, lane: Lane, process: int) -> Iterator[Event]:
    for stretch in timeline.of_lane[lane]:
        said = {
            name: value
            for name in ("step", "round", "phase", "layer", "group", "chunk", "flops", "bytes")
            if (value := getattr(stretch, name)) not in (None, 0.0) or name in ("step", "round", "layer", "chunk")
        }
        name = kind(lane, stretch.name).label
        title = name if stretch.layer is None else f"{name} {stretch.layer}"
        yield _slice(title, stretch.start, stretch.end, process, THREADS[lane], said)


def _rates(timeline: Timeline, lane: Lane, process: int) -> Iterator[Event]:
    """A value where a stretch begins, and nothing where a gap does."""
    compute = lane == "compute"
    name = {"compute": "TFLOP/s", "inbound": "GB/s in", "outbound": "GB/s out"}[lane]
    stretches = [s for s in timeline.of_lane[lane] if s.end > s.start]
    for stretch, after in zip_longest(stretches, stretches[1:]):
        amount = stretch.flops / 1e12 if compute else stretch.bytes / 1e9
        yield _counter(name, stretch.start, {"value": round(amount / (stretch.end - stretch.start), 3)}, process)
        if after is None or after.start > stretch.end:
            yield _counter(name, stretch.end, {"value": 0}, process)


def _slice(name: str, start: float, end: float, process: int, thread: int, said: Event) -> Event:
    begins, ends = _microseconds(start), _microseconds(end)
    duration = round(ends - begins, 3)
    return {"ph": "X", "name": name, "ts": begins, "dur": duration, "pid": process, "tid": thread, "args": said}


def _counter(name: str, time: float, values: Event, process: int) -> Event:
    return {"ph": "C", "name": name, "ts": _microseconds(time), "pid": process, "args": values}


def _microseconds(seconds: float) -> float:
    """To the nanosecond, so that a range and the work it begins with begin together."""
    return round(1e6 * seconds, 3)
