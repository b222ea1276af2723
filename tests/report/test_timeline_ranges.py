"""Named ranges nest, are numbered as the work in them, and are not cut by an update in their midst."""

from itertools import pairwise

import pytest
from synthetic_timeline import small

from llmb.perfmodel.offload.stream_timeline import StreamTimeline, TimelineEvent
from llmb.report.timeline.named_ranges import ranges
from llmb.report.timeline.tracks import Timeline
from llmb.report.timeline.views import views


def timeline_event(name, start, end, step=0, **more):
    phase = "backward" if name == "recompute" else name
    return TimelineEvent(stream="compute", name=name, start=start, end=end, step=step, phase=phase, **more)


@pytest.mark.parametrize("above", [("step", "round"), ("step", "phase"), ("phase", "layer"), ("phase", "chunk")])
def test_every_range_lies_within_one_of_a_level_above(above):
    outer, inner = (Timeline.of(small()).ranges[level] for level in above)
    assert inner
    assert all(any(o.start <= i.start and i.end <= o.end for o in outer) for i in inner)


def test_ranges_of_a_level_follow_one_another():
    for actual in Timeline.of(small()).ranges.values():
        assert all(a.end <= b.start for a, b in pairwise(actual))


def test_the_synthetic_run_has_the_ranges_it_was_made_with():
    actual = Timeline.of(small()).ranges
    assert [r.labels[0] for r in actual["step"]] == ["Step 0", "Step 1"]
    assert [r.labels[0] for r in actual["round"]] == ["Round 0", "Round 1"] * 2
    assert len([r for r in actual["layer"] if r.of.phase == "forward"]) == 2 * 2 * 8
    assert len([r for r in actual["chunk"] if r.of.phase == "backward"]) == 2 * 2 * 8 * 2
    assert [r.labels[0] for r in actual["layer"] if r.of.phase == "update"][:2] == [
        "Update of layer 0",
        "Update of layer 1",
    ]


def test_chunks_are_named_with_their_group():
    chunk = ranges([timeline_event("forward", 0, 1, round=0, layer=2, group=5, chunk=1)], "chunk")[0]
    assert chunk.labels == ("Group 5, chunk 1", "G5 C1", "C1", "1")
    assert ranges([timeline_event("head", 0, 1, chunk=1)], "chunk")[0].labels[0] == "Chunk 1"


def test_update_between_backward_layers_does_not_split_backward():
    compute = [
        timeline_event("backward", 0, 1, round=0, layer=2, chunk=0),
        timeline_event("update", 1, 2, layer=2),
        timeline_event("backward", 2, 3, round=0, layer=1, chunk=0),
        timeline_event("update", 3, 4, layer=1),
    ]
    assert [(r.start, r.end) for r in ranges(compute, "round")] == [(0, 3)]
    assert [(r.of.phase, r.start, r.end) for r in ranges(compute, "phase")] == [("backward", 0, 3), ("update", 3, 4)]
    assert [r.labels[0] for r in ranges(compute, "layer")] == [
        "Layer 2", "Update of layer 2", "Layer 1", "Update of layer 1",
    ]  # fmt: skip


def test_update_in_the_next_forward_does_not_split_the_step():
    compute = [
        timeline_event("backward", 0, 1, step=0, round=0, layer=0),
        timeline_event("forward", 1, 2, step=1, round=0, layer=0),
        timeline_event("update", 2, 3, step=0, layer=1),
        timeline_event("forward", 3, 4, step=1, round=0, layer=1),
    ]
    assert [(r.of.step, r.start, r.end) for r in ranges(compute, "step")] == [(0, 0, 1), (1, 1, 4)]


def test_the_six_views_lie_in_the_run_each_within_the_wider_one():
    timeline = Timeline.of(small())
    actual = {view.name: view for view in views(timeline)}
    assert list(actual) == [
        "training_overview", "step_overview", "round_overview", "fwd_layers", "bwd_layers", "step_overhead",
    ]  # fmt: skip
    for outer, inner in pairwise([actual[n] for n in ("training_overview", "step_overview", "round_overview")]):
        assert outer.start <= inner.start < inner.end <= outer.end
    for name in ("fwd_layers", "bwd_layers"):
        assert actual["round_overview"].start <= actual[name].start < actual[name].end <= actual["round_overview"].end
    assert actual["fwd_layers"].covers == (1, 2, 3, 4, 5)
    assert actual["bwd_layers"].covers == (6, 5, 4, 3, 2)
    assert actual["step_overhead"].covers == (2, 1, 0, "update", 0, 1, 2)
    assert actual["step_overhead"].start < timeline.ranges["step"][1].start < actual["step_overhead"].end


def test_a_view_that_the_run_does_not_have_is_left_out():
    streams = StreamTimeline(source="measured", events=(timeline_event("forward", 0, 1),))
    assert [view.name for view in views(Timeline.of(streams))] == ["training_overview", "step_overview"]
