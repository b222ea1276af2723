"""The words under the pictures, against cases worked out by hand."""

from dataclasses import replace

import pytest
from synthetic_timeline import small

from llmb.perfmodel.offload.stream_timeline import StreamTimeline, TimelineEvent
from llmb.report.timeline.axis_units import duration, figures, marks, percent
from llmb.report.timeline.captions import captions
from llmb.report.timeline.optimizer_cost import optimizer_cost
from llmb.report.timeline.predicted_vs_measured import compare
from llmb.report.timeline.time_account import time_breakdown
from llmb.report.timeline.tracks import Timeline
from llmb.report.timeline.views import views


def work(stream, name, start, end, phase="forward", step=0, **more):
    return TimelineEvent(stream=stream, name=name, start=start, end=end, phase=phase, step=step, **more)


def streams(*events, **more):
    return StreamTimeline(source="measured", events=events, **more)


BY_HAND = streams(
    work("compute", "forward", 0.0, 4.0, layer=0, round=0, flops=4e15),
    work("inbound", "param", 3.0, 5.0, layer=1, round=0, bytes=100_000_000_000),  # 1 s of 2 hidden
    work("compute", "forward", 5.0, 8.0, layer=1, round=0, flops=1e15),  # waited 1 s for it
    work("outbound", "rest", 4.0, 6.0, layer=0, round=0, bytes=50_000_000_000),  # 1 s of 2 hidden
    work("inbound", "rest", 8.0, 8.5, phase="backward", layer=1, round=0),  # none hidden: waited 0.5 s
    work("compute", "recompute", 8.5, 9.5, phase="backward", layer=1, round=0),
    work("compute", "backward", 9.5, 10.0, phase="backward", layer=1, round=0, flops=0.5e15),
    peak_tflops=1000.0,
)


def test_breakdown_by_hand():
    here = time_breakdown(Timeline.of(BY_HAND), 0.0, 10.0)
    assert here.busy == {"compute": 8.5, "inbound": 2.5, "outbound": 2.0}
    assert (here.hidden, here.copying, here.waiting) == (2.0, 4.5, 1.5)
    assert here.tflops == pytest.approx(550.0)
    assert [(w.copy.name, w.copy.layer) for w in here.waits] == [("param", 1), ("rest", 1)]
    assert here.work_by_kind["inbound", "param"].rate == (50.0, "GB/s")


def test_event_across_the_boundary_counts_partly():
    here = time_breakdown(Timeline.of(BY_HAND), 2.0, 4.5)
    assert here.busy == {"compute": 2.0, "inbound": 1.5, "outbound": 0.5}
    assert here.work_by_kind["compute", "forward"].flops == pytest.approx(2e15)
    assert here.waiting == pytest.approx(0.5)


def test_captions_by_hand():
    timeline = Timeline.of(BY_HAND)
    round_view = next(view for view in views(timeline) if view.name == "round_overview")
    assert captions(timeline, round_view) == [
        "44 % of the copying time is hidden behind compute; for 15 % of the round (1.50 s) the GPU waits, "
        "mostly for the weights of layer 1.",
        "No stream bounds it alone: compute is busy 85 %, the link 25 % in and 20 % out; "
        "550 TFLOP/s, 55 % of the peak; recomputing takes 12 % of the compute time.",
    ]


def test_wait_without_a_copy_has_no_cause():
    late = streams(work("compute", "forward", 0, 1), work("compute", "forward", 3, 4), work("inbound", "kv", 0, 2))
    assert [wait.copy for wait in Timeline.of(late).waits] == [None]
    assert "all of it in gaps that end with no copy" in captions(Timeline.of(late), views(Timeline.of(late))[0])[0]


def test_copy_that_ended_before_the_wait_is_not_its_cause():
    early = streams(
        work("compute", "forward", 0, 1), work("compute", "forward", 1.00001, 2), work("inbound", "kv", 0, 1)
    )
    assert [wait.copy for wait in Timeline.of(early).waits] == [None]


def test_wait_for_a_copy_out_is_named():
    stuck = streams(work("compute", "forward", 0, 1), work("outbound", "rest", 0, 2), work("compute", "forward", 2, 3))
    assert "all of it for the activations to leave" in captions(Timeline.of(stuck), views(Timeline.of(stuck))[0])[0]


def test_the_first_step_waits_from_its_beginning():
    cold = streams(work("inbound", "param", 0, 1, layer=0), work("compute", "forward", 1, 2))
    assert [(w.start, w.end, w.copy.name) for w in Timeline.of(cold).waits] == [(0, 1, "param")]


def test_bound_is_named():
    full = streams(work("compute", "forward", 0, 1), work("inbound", "param", 0, 0.95), work("outbound", "rest", 0, 1))
    message = captions(Timeline.of(full), views(Timeline.of(full))[0])
    assert message[0] == "All copying is hidden behind compute; the GPU practically never waits."
    assert message[1].startswith("Compute, the link in and the link out bound it: compute is busy 100 %")
    alone = Timeline.of(streams(work("compute", "forward", 0, 1)))
    assert captions(alone, views(alone)[0]) == [
        "Nothing is copied; the GPU practically never waits.",
        "Compute bounds it: compute is busy 100 %, the link 0 % in and 0 % out.",
    ]


def test_prediction_of_fewer_rounds_is_extrapolated():
    measured, predicted = Timeline.of(small(rounds=6)), Timeline.of(small("predicted", rounds=3))
    for view, second in zip(views(measured)[:2], views(predicted)[:2], strict=True):
        compared = compare(measured, view, predicted, second)
        assert compared.shown_rounds == 3
        assert compared.predicted == pytest.approx(compared.measured, rel=1e-6)
        assert all(was == pytest.approx(should, abs=2e-3) for _, was, should in compared.rows)
        assert "(from 3 of its 6 rounds), measured" in captions(measured, view, (predicted, second))[-1]
    fewer = Timeline.of(small("predicted", rounds=2))
    assert "not compared" in captions(measured, views(measured)[1], (fewer, views(fewer)[1]))[-1]


def test_recomputation_is_merged_into_backward_where_only_one_has_it():
    def untold(event):
        return replace(event, name="backward") if event.name == "recompute" else event

    streams = small("predicted")
    measured = Timeline.of(small())
    predicted = Timeline.of(replace(streams, events=tuple(untold(s) for s in streams.events)))
    compared = compare(measured, views(measured)[0], predicted, views(predicted)[0])
    assert ("compute", "recompute") not in [work for work, *_ in compared.rows]
    assert all(was == pytest.approx(should) for _, was, should in compared.rows)


def test_optimizer_cost_is_kernels_and_waits():
    two = streams(
        work("compute", "backward", 0, 10, phase="backward", layer=0),
        work("inbound", "state", 9, 11, phase="update", layer=0),
        work("compute", "update", 11, 11.5, phase="update", layer=0),
        work("outbound", "param", 11.5, 12, phase="update", layer=0),
        work("compute", "forward", 12, 20, step=1, layer=0),
        work("compute", "update", 20, 20.5, phase="update", step=1, layer=0),
        work("outbound", "param", 20.5, 25, phase="update", step=1, layer=0),  # the next step would hide it
    )
    cost = optimizer_cost(Timeline.of(two))
    assert (cost.kernels, cost.waiting, cost.exposed) == (0.5, 1.5, 2.0)
    timeline = Timeline.of(two)
    border = next(view for view in views(timeline) if view.name == "step_overhead")
    assert "the optimizer holds up training for 2.00 s a step (500 ms of kernels, 1.50 s of waiting)" in " ".join(
        captions(timeline, border)
    )
    assert optimizer_cost(Timeline.of(BY_HAND)) is None


def test_prediction_is_compared_with_the_measurement():
    measured, predicted = Timeline.of(small()), Timeline.of(small("predicted", forward_s=0.008))
    foreseen = {view.name: view for view in views(predicted)}
    for view in views(measured):
        last = captions(measured, view, (predicted, foreseen[view.name]))[-1]
        assert last.startswith("Predicted "), last
    forward = next(view for view in views(measured) if view.name == "fwd_layers")
    assert captions(measured, forward, (predicted, foreseen["fwd_layers"]))[-1] == (
        "Predicted 80.0 ms, measured 100 ms (+25.0 %); "
        "largest differences: forward, predicted 80.0 ms, measured 100 ms."
    )


def test_slow_link_is_named_with_its_waits():
    measured, predicted = Timeline.of(small(link_gbs=15.0)), Timeline.of(small("predicted", link_gbs=30.0))
    message = captions(measured, views(measured)[1], (predicted, views(predicted)[1]))[-1]
    # 2 rounds of 10 copies of 0.4 GB: 8 GB at 30 and at 15 GB/s
    assert (
        "largest differences: weights in, predicted 267 ms, measured 533 ms; waiting, predicted 0 s, measured "
        in message
    )


def test_exact_prediction_is_stated():
    measured, predicted = Timeline.of(small()), Timeline.of(small("predicted"))
    message = captions(measured, views(measured)[0], (predicted, views(predicted)[0]))[-1]
    assert message == "Predicted 1.18 s a step, measured 1.18 s (0.0 %); every kind of work takes the predicted time."


def test_a_prediction_of_other_layers_is_not_compared():
    measured, predicted = Timeline.of(small()), Timeline.of(small("predicted", layers=12))
    forward = [next(v for v in views(t) if v.name == "fwd_layers") for t in (measured, predicted)]
    assert "not compared" in captions(measured, forward[0], (predicted, forward[1]))[-1]


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(0, "0 s"), (163.2, "163 s"), (1.2345, "1.23 s"), (0.9999, "1.00 s"), (0.0136, "13.6 ms"), (1e-4, "100 \u00b5s")],
)
def test_durations_have_three_figures_and_a_unit(seconds, message):
    assert duration(seconds) == message


def test_numbers_keep_three_figures():
    assert [figures(v) for v in (0, 1234.5, 99.99, 12.34, 0.1234)] == ["0", "1,234", "100", "12.3", "0.123"]
    assert [percent(v) for v in (0, 0.0004, 0.013, 0.44, 0.985, 0.997, 1)] == [
        "0 %", "less than 0.1 %", "1.3 %", "44 %", "98 %", "99.7 %", "100 %",
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", [3e-6, 0.00047, 0.0136, 0.3, 1.61, 59.2, 560.0, 4321.0])
def test_ticks_are_few_even_and_distinct(seconds):
    chosen = marks(seconds)
    values = chosen.up_to(seconds)
    labels = [chosen.label(value) for value in values]
    assert 4 <= len(values) <= 13
    assert values[0] == 0
    assert values == sorted(set(values))
    assert values[-1] <= seconds * (1 + 1e-6)
    assert len(set(labels)) == len(labels)
