"""Stream timelines as a Chrome trace, for chrome://tracing and Perfetto: every event, to be zoomed into.

    trace_bytes([measured, predicted]) -> the bytes of trace.json.gz

A process for each timeline, a thread for each stream and one for the named ranges, in which step, round, phase, layer
and chunk nest; counters of TFLOP/s, of GB/s in and out, and of memory. Times are microseconds, as the format demands.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from llmb.perfmodel.offload.stream_timeline import STREAMS, StreamName
from llmb.report.timeline.named_ranges import RANGE_LEVELS
from llmb.report.timeline.task_kinds import DIRECTIONS, STREAM_LABELS, work_kind
from llmb.report.timeline.tracks import Timeline

TraceEvent = dict[str, Any]
RANGES_THREAD = 1
THREADS: dict[StreamName, int] = {stream: RANGES_THREAD + 1 + i for i, stream in enumerate(STREAMS)}


def trace_bytes(timelines: Sequence[Timeline]) -> bytes:
    """Return the whole trace, gzipped; without a timestamp, so that the same timelines give the same bytes."""
    events = [event for process, timeline in enumerate(timelines, start=1) for event in _events(timeline, process)]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def _events(timeline: Timeline, process: int) -> Iterator[TraceEvent]:
    yield from _names(timeline, process)
    yield from _ranges(timeline, process)
    for stream in timeline.shown_streams:
        yield from _work(timeline, stream, process)
        if timeline.has_amounts(stream):
            yield from _rates(timeline, stream, process)
    for (time, device), (_, host) in zip(timeline.device_gib, timeline.host_gib, strict=True):
        yield _counter("memory GiB", time, {"device": round(device, 3), "host": round(host, 3)}, process)


def _names(timeline: Timeline, process: int) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.streams.source}}
    threads = {"Ranges": RANGES_THREAD, **{STREAM_LABELS[stream]: THREADS[stream] for stream in timeline.shown_streams}}
    for name, thread in threads.items():
        where: TraceEvent = {"ph": "M", "pid": process, "tid": thread}
        yield {**where, "name": "thread_name", "args": {"name": name}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _ranges(timeline: Timeline, process: int) -> Iterator[TraceEvent]:
    """Yield the widest first: of slices that begin together, a viewer takes the first for the outer one."""
    for level in RANGE_LEVELS:
        for named in timeline.ranges[level]:
            yield _slice(named.labels[0], named.start, named.end, process, RANGES_THREAD, {"level": level})


def _work(timeline: Timeline, stream: StreamName, process: int) -> Iterator[TraceEvent]:
    for event in timeline.by_stream[stream]:
        args = {
            name: value
            for name in ("step", "round", "phase", "layer", "group", "chunk", "flops", "bytes")
            if (value := getattr(event, name)) not in (None, 0.0) or name in ("step", "round", "layer", "chunk")
        }
        name = work_kind(stream, event.name).label
        title = name if event.layer is None else f"{name} {event.layer}"
        yield _slice(title, event.start, event.end, process, THREADS[stream], args)


def _rates(timeline: Timeline, stream: StreamName, process: int) -> Iterator[TraceEvent]:
    """Yield a value where an event begins, and 0 where a gap does."""
    compute = stream == "compute"
    name = ("TFLOP/s" if compute else "GB/s") + DIRECTIONS[stream]
    events = [s for s in timeline.by_stream[stream] if s.end > s.start]
    for event, after in zip_longest(events, events[1:]):
        amount = event.flops / 1e12 if compute else event.bytes / 1e9
        yield _counter(name, event.start, {"value": round(amount / (event.end - event.start), 3)}, process)
        if after is None or after.start > event.end:
            yield _counter(name, event.end, {"value": 0}, process)


def _slice(name: str, start: float, end: float, process: int, thread: int, args: TraceEvent) -> TraceEvent:
    begins, ends = _microseconds(start), _microseconds(end)
    duration = round(ends - begins, 3)
    return {"ph": "X", "name": name, "ts": begins, "dur": duration, "pid": process, "tid": thread, "args": args}


def _counter(name: str, time: float, values: TraceEvent, process: int) -> TraceEvent:
    return {"ph": "C", "name": name, "ts": _microseconds(time), "pid": process, "args": values}


def _microseconds(seconds: float) -> float:
    """Round to the nanosecond, so that a range and the event it begins with start together."""
    return round(1e6 * seconds, 3)
