"""The pictures: everything lies inside, nothing narrower than a pixel is lost, the same data give the same bytes."""

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_timeline import Engine, small

from llmb.perfmodel.offload.stream_timeline import MemoryUse, StreamTimeline, TimelineEvent
from llmb.report.timeline.pixel_columns import Columns, levels, runs, spread, stacked
from llmb.report.timeline.svg_picture import LEFT, MARGIN, WIDTH, picture
from llmb.report.timeline.task_kinds import COMPUTE_KINDS, COPY_KINDS
from llmb.report.timeline.tracks import Timeline
from llmb.report.timeline.views import views

SVG = "{http://www.w3.org/2000/svg}"
BAR = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)(?:v([\d.]+)|V([\d.]+))h-([\d.]+)z")


def drawn(streams, predicted=None):
    """Every picture of a stream timeline, as trees."""
    timeline = Timeline.of(streams)
    second = None if predicted is None else Timeline.of(predicted)
    foreseen = {view.name: (second, view) for view in views(second)} if second else {}
    return {
        v.name: ElementTree.fromstring(picture(timeline, v, foreseen.get(v.name)).on_page()) for v in views(timeline)
    }


def boxes(tree):
    """(x, y, width, height) of all that is filled."""
    for rect in tree.iter(f"{SVG}rect"):
        yield tuple(float(rect.get(name)) for name in ("x", "y", "width", "height"))
    for path in tree.iter(f"{SVG}path"):
        for x, y, width, height, bottom, back in BAR.findall(path.get("d")):
            assert width == back
            yield float(x), float(y), float(width), float(height) if height else float(bottom) - float(y)


def assert_inside(tree):
    _, _, width, height = map(float, tree.get("viewBox").split())
    assert width == WIDTH
    for x, y, w, h in boxes(tree):
        assert LEFT <= x < x + w <= (WIDTH - MARGIN) + 0.02, (x, w)
        assert 0 <= y < y + h <= height, (y, h)
    for text in tree.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= WIDTH
        assert 8 <= float(text.get("y")) <= height


@pytest.mark.parametrize("predicted", [None, small("predicted", forward_s=0.012)], ids=["alone", "predicted"])
def test_everything_lies_inside_the_picture(predicted):
    for tree in drawn(small(), predicted).values():
        assert_inside(tree)


def test_no_two_labels_of_a_line_overlap():
    for name, tree in drawn(small(), small("predicted")).items():
        lines = {}
        for text in tree.iter(f"{SVG}text"):
            css, x, width = text.get("class") or "", float(text.get("x")), 5.5 * len(text.text)
            left = x - width / 2 if "mid" in css else x - width if "end" in css else x
            lines.setdefault(text.get("y"), []).append((left, left + width, text.text))
        for labels in lines.values():
            labels.sort()
            for (_, end, item), (start, _, second) in pairwise(labels):
                assert end <= start, (name, item, second)


def test_time_marks_rise_from_the_left():
    for tree in drawn(small()).values():
        ticks = [t for t in tree.iter(f"{SVG}text") if "tick" in (t.get("class") or "")]
        places = [float(t.get("x")) for t in ticks]
        values = [float(t.text.replace(",", "")) for t in ticks]
        assert places[0] == LEFT
        assert values[0] == 0
        assert places == sorted(places)
        assert values == sorted(set(values))


def test_each_event_is_drawn_at_its_time():
    streams = StreamTimeline(
        source="measured",
        events=(
            TimelineEvent(
                stream="compute", name="forward", start=0, end=1, step=0, phase="forward", layer=3, flops=6e14
            ),
            TimelineEvent(stream="compute", name="backward", start=2, end=4, step=0, phase="backward"),
        ),
    )
    tree = drawn(streams)["training_overview"]
    actual = {r.get("class").split()[0]: r for r in tree.iter(f"{SVG}rect") if r.get("class").startswith("k-")
             and float(r.get("height")) > 20}  # fmt: skip
    quarter = ((WIDTH - MARGIN) - LEFT) / 4
    assert float(actual["k-forward"].get("x")) == LEFT
    assert float(actual["k-forward"].get("width")) == quarter
    assert float(actual["k-wait"].get("x")) == LEFT + quarter
    assert float(actual["k-backward"].get("x")) == LEFT + 2 * quarter
    assert actual["k-forward"].find(f"{SVG}title").text == "forward, layer 3: 1.00 s, 600 TFLOP/s"


@pytest.mark.slow
def test_run_of_many_events_stays_a_small_picture():
    few = Engine(layers=32, rounds=2, resident=4).streams(1)
    many = Engine(layers=32, rounds=24, resident=4).streams(1)
    assert len(many.events) > 5_000
    timeline = Timeline.of(many)
    overview = picture(timeline, views(timeline)[0]).alone()
    assert len(overview) < 250_000
    assert_inside(ElementTree.fromstring(picture(timeline, views(timeline)[0]).on_page()))
    assert set(drawn(few)) == set(drawn(many))


def test_same_timeline_gives_the_same_picture():
    item, second = Timeline.of(small()), Timeline.of(small())
    for view, repeated in zip(views(item), views(second), strict=True):
        assert picture(item, view).alone() == picture(second, repeated).alone()


def test_a_file_of_its_own_has_the_style_and_every_texture_it_names():
    timeline = Timeline.of(small())
    text = picture(timeline, views(timeline)[0]).alone()
    assert set(re.findall(r"url\(#([\w-]+)\)", text)) == set(re.findall(r'<pattern id="([\w-]+)"', text))
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("kinds", [COMPUTE_KINDS, COPY_KINDS], ids=["compute", "copies"])
def test_kinds_of_a_track_differ_without_colour(kinds):
    """Two of one texture differ clearly in grey."""

    def grey(work_kind):
        red, green, blue = (int(work_kind.colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.3 * red + 0.59 * green + 0.11 * blue

    for texture in {work_kind.texture for work_kind in kinds}:
        shades = sorted(grey(work_kind) for work_kind in kinds if work_kind.texture == texture)
        assert all(lighter - darker > 25 for darker, lighter in pairwise(shades)), texture


def test_work_of_an_unknown_name_is_drawn_and_named():
    odd = TimelineEvent(stream="inbound", name='<b>"new"&', start=0, end=1, step=0, phase="forward", bytes=10)
    streams = StreamTimeline(
        source="measured",
        events=(odd, TimelineEvent(stream="compute", name="forward", start=0, end=1, step=0, phase="forward")),
    )
    tree = drawn(streams)["training_overview"]
    assert any(rect.get("class").startswith("k-other") for rect in tree.iter(f"{SVG}rect"))
    assert any(text.text == '<b>"new"&' for text in tree.iter(f"{SVG}text"))


def test_memory_is_left_out_where_it_was_not_recorded():
    streams = small()
    without = StreamTimeline(source="measured", events=streams.events)
    with_it, bare = (drawn(each)["training_overview"] for each in (streams, without))
    assert "Device GiB" in [t.text for t in with_it.iter(f"{SVG}text")]
    assert "Device GiB" not in [t.text for t in bare.iter(f"{SVG}text")]


def test_unknown_rate_is_left_out_and_an_idle_one_is_zero():
    streams = small()
    uncounted = tuple(replace(s, flops=0.0) for s in streams.events if s.stream != "inbound")
    names = [t.text for t in drawn(replace(streams, events=uncounted))["training_overview"].iter(f"{SVG}text")]
    assert "TFLOP/s" not in names
    assert "GB/s in" in names
    assert "GB/s out" in names


times = st.floats(0, 100, allow_nan=False).map(lambda t: round(t, 6))
events = st.builds(
    lambda stream, a, b, step: TimelineEvent(
        stream=stream, name="forward" if stream == "compute" else "rest", start=min(a, b), end=max(a, b), step=step,
        phase="forward", round=step % 2, layer=step % 3, flops=1e12, bytes=10**9,
    ),
    st.sampled_from(["compute", "inbound", "outbound"]), times, times, st.integers(0, 2),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(events, max_size=30), st.lists(times, max_size=5))
def test_any_timeline_is_drawn_inside_the_picture(some, moments):
    base = TimelineEvent(stream="compute", name="forward", start=1, end=50, step=0, phase="forward", round=0, layer=0)
    memory = tuple(MemoryUse(time=t, device_bytes=2**30, host_bytes=0) for t in moments)
    for tree in drawn(StreamTimeline(source="measured", events=(base, *some), memory=memory)).values():
        assert_inside(tree)


@settings(deadline=None)
@given(st.lists(st.tuples(times, times, st.floats(0, 1e6)), max_size=20), st.integers(1, 50))
def test_nothing_is_lost_when_work_is_spread_over_columns(pieces, count):
    columns = Columns(10, count, 0.0, 100.0)
    amounts = [(min(a, b), max(a, b), amount) for a, b, amount in pieces if a != b]
    assert sum(spread(amounts, columns)) == pytest.approx(sum(amount for *_, amount in amounts), rel=1e-6, abs=1e-6)


def test_spreading_by_hand():
    columns = Columns(0, 2, 0.0, 2.0)
    assert spread([(0.0, 1.5, 3.0)], columns) == [2.0, 1.0]
    assert spread([(-1.0, 1.0, 4.0), (1.5, 3.5, 4.0)], columns) == [2.0, 1.0]  # only what lies inside


def test_stacked_fractions_never_exceed_the_track():
    assert stacked([[0.5, 1.0], [0.25, 1.0]], 20.0) == [
        [(0, 0.0, 10.0), (1, 0.0, 10.0)],
        [(0, 10.0, 15.0), (1, 10.0, 20.0)],
    ]


def test_memory_keeps_its_value_until_the_next_sample():
    columns = Columns(0, 4, 0.0, 4.0)
    assert levels([(1.0, 5.0), (2.5, 7.0)], columns) == [None, 5.0, 7.0, 7.0]
    assert levels([(-3.0, 5.0), (-2.0, 6.0)], columns) == [6.0] * 4
    assert levels([], columns) == [None] * 4
    assert runs([None, 5.0, 5.1, 7.0]) == [(1, 2, 5.0), (3, 1, 7.0)]
