"""The Chrome trace: it loads, its slices nest, its tracks hold every interval, its counters agree with the timeline."""

import gzip
import json
from itertools import pairwise

import pytest
from synthetic_timeline import small

from llmb.report.timeline.chrome_trace import RANGES_THREAD, trace_bytes
from llmb.report.timeline.tracks import Timeline


def events(*streams):
    return json.loads(gzip.decompress(trace_bytes([Timeline.of(item) for item in streams])))["traceEvents"]


def test_every_event_is_a_slice_on_its_thread():
    streams = small()
    threads = {e["tid"]: e["args"]["name"] for e in events(streams) if e["name"] == "thread_name"}
    assert list(threads.values()) == ["Ranges", "Compute", "Copies in", "Copies out"]
    slices = [e for e in events(streams) if e["ph"] == "X" and e["tid"] != RANGES_THREAD]
    assert len(slices) == len(streams.events)
    first = min((s for s in slices if threads[s["tid"]] == "Copies in"), key=lambda s: s["ts"])
    assert first["name"] == "weights 3"
    assert first["args"] == {"step": 0, "round": 0, "phase": "forward", "layer": 3, "chunk": None, "bytes": 400_000_000}
    assert first["dur"] == 8000.0


def test_ranges_nest():
    open_ends, depths = [], []
    for slice_ in sorted(
        (e for e in events(small()) if e["ph"] == "X" and e["tid"] == RANGES_THREAD), key=lambda e: e["ts"]
    ):  # sorting keeps those that begin together in the file's order: the outer first
        while open_ends and open_ends[-1] <= slice_["ts"]:
            open_ends.pop()
        end = round(slice_["ts"] + slice_["dur"], 3)
        assert all(end <= outer for outer in open_ends), slice_
        open_ends.append(end)
        depths.append(len(open_ends))
    assert max(depths) == 5  # step > round > phase > layer > chunk


@pytest.mark.slow
def test_slices_of_a_thread_do_not_overlap():
    for thread in (2, 3, 4):
        slices = sorted((e["ts"], e["dur"]) for e in events(small()) if e["ph"] == "X" and e["tid"] == thread)
        for (start, took), (following, _) in pairwise(slices):
            assert round(start + took, 3) <= following


def test_counters_give_rates_and_memory():
    streams = small()
    counters = [e for e in events(streams) if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"TFLOP/s", "GB/s in", "GB/s out", "memory GiB"}
    assert max(e["args"]["value"] for e in counters if e["name"] == "TFLOP/s") == 600.0
    assert {e["args"]["value"] for e in counters if e["name"] == "GB/s in"} == {0, 50.0}
    assert len([e for e in counters if e["name"] == "memory GiB"]) == len(streams.memory)


def test_measured_and_predicted_are_two_processes():
    pair = events(small(), small("predicted"))
    names = {e["pid"]: e["args"]["name"] for e in pair if e["name"] == "process_name"}
    assert names == {1: "measured", 2: "predicted"}


def test_same_timelines_give_the_same_bytes():
    assert trace_bytes([Timeline.of(small())]) == trace_bytes([Timeline.of(small())])
