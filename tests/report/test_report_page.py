"""Report pages as text: sentences, arithmetic of the waterfall, thinned series, escaping, size."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from page_runs import HOSTILE, hostile, served, trained

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.errors import ConfigError
from llmb.events import GpuSample
from llmb.perfmodel.explain.explanation import TermPair
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.probe.node_collectives import NodeCollectives
from llmb.perfmodel.probe.probe_record import CollectiveRate, Collectives, ProbeDetails, ProbeRecord, spread
from llmb.report.page import chart_library
from llmb.report.page.ceilings_card import ceilings
from llmb.report.page.configuration_cards import configuration, flatten
from llmb.report.page.page_chart import plain
from llmb.report.page.run_page import run_page
from llmb.report.page.serving_charts import serving_charts
from llmb.report.page.several_page import several_page
from llmb.report.page.thinning import BINS, MOST_POINTS, thin
from llmb.report.page.training_charts import outliers, steps_by_rank, training_charts
from llmb.report.page.verdict_card import bar_chart, sentences
from llmb.report.page.waterfall_chart import plan_chart, step_bars
from llmb.results.result import MeasuredCeiling

MOST_BYTES = 8_000_000


def charts_of(page):
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)[1])


def named(charts, name):
    return next(chart for chart in charts if chart.name == name)


def test_the_top_says_what_ran_how_fast_and_is_that_good(recipes):
    description, speed, standing = sentences(trained(recipes))
    assert "1 x NVIDIA H200" in description
    assert "A step takes 4.2" in speed
    assert "MFU" in speed
    assert "times the predicted speed" in standing
    assert "80 % interval" in standing
    assert "% of what the chip sustains" in standing


def test_the_top_says_a_power_limit_that_is_not_the_default(recipes):
    record = trained(recipes)
    device = {"power_limit_w": 400.0, "power_default_w": 700.0}
    description = sentences(replace(record, result=replace(record.result, device=device)))[0]
    assert "1 x NVIDIA H200 (power limit 400 W, the part's default is 700 W)" in description


def test_ceilings_that_the_probe_measured_stand_beside_the_result(recipes):
    record = trained(recipes)
    assert 'id="ceilings"' not in run_page(record)
    seconds = spread([0.002, 0.003, 0.004])
    rate = CollectiveRate(operation="all_reduce", bytes=1 << 30, seconds=seconds, algbw_gbs=200.0, busbw_gbs=350.0)
    details = ProbeDetails(
        host="n1", gpu_name="NVIDIA H200", measured_at="now", model=HOSTILE, gemm_tflops={"fp8": spread([1200.0] * 3)},
        rates={"matmul_tflops": spread([670.0, 680.0, 690.0])}, launch_us=spread([4.5]),
        collectives=Collectives(backend="nccl", ranks=8, nodes=1, rates=(rate,)),
    )  # fmt: skip
    ceiling = MeasuredCeiling(
        tflops=H200.matmul_tflops, dtype="bf16", fraction=0.437, memory_gbs=4321.0, source="measured on n1"
    )
    record = replace(record, result=replace(record.result, measured_ceiling=ceiling))
    text = ceilings(replace(record, probe=ProbeRecord(rates=H200, details=details)))
    assert "44 % of what bf16 GEMMs sustain there" in text  # as the result says, not computed again
    assert "An all-reduce of 1 GiB among 8 ranks has a bus bandwidth of 350 GB/s." in text
    assert "680" in text
    assert "<script>" not in text
    assert "54.5" in ceilings(replace(record, probe=ProbeRecord(rates=H200)))  # a file of an older version
    collectives = Collectives(backend="nccl", ranks=16, nodes=2, rates=(rate,))
    nodes = NodeCollectives(gpu="h200", nodes=("n1", "n2"), measured_at="today", collectives=collectives)
    text = ceilings(replace(record, node_collectives=nodes))  # without a probe of the machine
    assert "all-reduce of 1 GiB, 16 ranks on 2 nodes, nccl" in text
    assert "Collectives on n1, n2: today." in text
    for probe in (None, ProbeRecord(rates=replace(H200, matmul_tflops=1.0))):  # gone, or of a later probe
        text = ceilings(replace(record, probe=probe))
        assert "4,321" in text
        assert "44 % of what bf16 GEMMs sustain there" in text
        assert "measured on n1" in text


def test_the_bar_shows_all_rates_in_one_unit(recipes):
    record = trained(recipes)
    (trace,) = bar_chart(record).traces
    rates = {label.split("<br>")[0]: rate for label, rate in zip(trace["y"], trace["x"], strict=True)}
    assert rates["measured"] == pytest.approx(record.result.tokens_per_s_per_gpu, rel=1e-5)
    assert rates["predicted"] == pytest.approx(rates["measured"] / record.result.predicted.ratio, rel=1e-4)
    limit = record.explanation.limits[0]
    assert rates["limit of the chip"] == pytest.approx(rates["measured"] / limit.fraction, rel=1e-4)


def test_the_waterfall_of_a_prediction_ends_at_the_measured_step(recipes):
    record = trained(recipes)
    bars = step_bars(record)
    assert bars[0].seconds == pytest.approx(record.result.mfu * record.result.step_time_s.median)
    assert bars[-1].name == "not explained"
    assert sum(bar.seconds for bar in bars) == pytest.approx(record.result.step_time_s.median)
    for before, after in pairwise(bars):
        assert after.start_s == pytest.approx(before.start_s + before.seconds)
    assert all(bar.arithmetic for bar in bars)


def test_the_waterfall_of_a_profile_is_the_measured_breakdown(recipes):
    bars = step_bars(trained(recipes, profiled=True))
    assert sum(bar.seconds for bar in bars) == pytest.approx(4.3)
    peak = {bar.name: bar.seconds for bar in bars}
    assert peak["at the chip's peak"] + peak["matrix products"] + peak["attention"] == pytest.approx(4.3 * 0.8)


def test_an_out_of_core_run_shows_its_plan_by_stream(recipes):
    record = trained(recipes)
    terms = (
        TermPair(kind="computation", measured_s=None, predicted_s=4.0),
        TermPair(kind="H2D copies", measured_s=None, predicted_s=1.5),
    )
    (trace,) = plan_chart(replace(record, explanation=replace(record.explanation, terms=terms))).traces
    assert trace["x"][::-1] == [4.0, 1.5, pytest.approx(record.result.step_time_s.median, rel=1e-5)]
    assert set(trace["base"]) == {0.0}
    assert plan_chart(replace(record, explanation=None)) is None


def test_an_outlier_is_marked_and_the_window_is_shaded(recipes):
    record = trained(recipes)
    chart = named(training_charts(record), "step-time")
    assert next(trace for trace in chart.traces if trace["name"] == "outlier")["x"] == [20]
    assert any(shape["type"] == "rect" and shape["x0"] == 2.5 for shape in chart.layout["shapes"])
    assert outliers(steps_by_rank(record)[0][:2], 1, 2) == []


def test_several_ranks_have_boxes(recipes):
    (box,) = named(training_charts(trained(recipes, ranks=3)), "ranks").traces
    assert box["x"] == [0, 1, 2]
    assert box["median"] == sorted(box["median"])


def test_power_and_clocks_over_time(recipes):
    record = trained(recipes)
    chart = named(training_charts(record), "power-clocks")
    power, clock = chart.traces
    assert (power["name"], clock["name"], clock["yaxis"]) == ("power", "SM clock", "y2")
    assert len(power["x"]) == len(clock["y"]) == 336
    window = chart.layout["shapes"][0]  # steps 3 to 40, of 4.2 s each
    assert (window["x0"], window["x1"]) == pytest.approx((3 * 4.2 - 4.2, 168), abs=0.1)
    assert "power cap in 50 %" in chart.captions[1]
    band = named(training_charts(trained(recipes, ranks=3)), "power-clocks")
    assert "3 GPUs" in band.captions[0]
    assert len(band.traces) == 6  # a line and the two edges of its band, of power and clock
    served_chart = named(serving_charts(served(recipes)), "power-clocks")
    assert len(served_chart.traces[0]["x"]) == 20  # without the warm-up
    unsampled = replace(record, events=[e for e in record.events if not isinstance(e, GpuSample)])
    assert "power-clocks" not in {chart.name for chart in training_charts(unsampled)}


def test_a_thinned_series_keeps_every_extreme():
    y = [0.0] * (10 * MOST_POINTS)
    y[777], y[12_345] = 9.0, -5.0
    bins = thin(range(len(y)), y)
    assert len(bins.x) <= BINS
    assert (max(bins.high), min(bins.low), set(bins.middle)) == (9.0, -5.0, {0.0})
    assert f"{bins.per_bin} steps" in bins.caption("steps")
    assert thin([1.0], [2.0]).caption("steps") is None


def test_serving_charts_hold_every_request(recipes):
    record = served(recipes)
    charts = serving_charts(record)
    assert {"ttft-distribution", "tpot-distribution", "itl-distribution", "e2e-distribution"} <= {
        c.name for c in charts
    }
    assert sum(named(charts, "ttft-distribution").traces[0]["y"]) == 64
    assert sum(named(charts, "itl-distribution").traces[0]["y"]) == 64 * 19
    rates = named(charts, "tokens-per-s").traces[0]
    width = rates["x"][1] - rates["x"][0]
    assert sum(rates["y"]) * width == pytest.approx(64 * 20, rel=1e-3)
    assert max(named(charts, "kv-cache").traces[0]["y"]) == pytest.approx(49.0)


def test_a_failed_run_has_a_page(recipes):
    record = trained(recipes)
    record = replace(record, result=replace(record.result, status="oom", reason="out of memory"), explanation=None)
    page = run_page(record)
    assert "It ended as oom: out of memory." in page


def test_texts_from_outside_are_escaped(recipes):
    record = hostile(trained(recipes))
    for page in (run_page(record), several_page([record, record])):
        assert "<script>document" not in page
        assert "<img" not in page
        assert HOSTILE not in page
        charts_of(page)
    assert plain("<b>") == "&lt;b&gt;"


def test_figures_are_flat_and_unknown_ones_are_left_out():
    assert dict(flatten({"a": {"b": 1, "c": None}, "d": [2, 3], "samples": [1]})) == {"a.b": 1, "d.0": 2, "d.1": 3}


def test_long_runs_stay_small(recipes):
    assert len(run_page(trained(recipes, steps=20_100))) < MOST_BYTES / 2
    assert len(run_page(served(recipes, requests=20_100, tokens=2))) < MOST_BYTES / 2


@pytest.mark.nightly
def test_the_longest_runs_stay_small(recipes):
    assert len(run_page(trained(recipes, steps=200_000))) < MOST_BYTES
    assert len(run_page(served(recipes, requests=100_000, tokens=16))) < MOST_BYTES


def test_without_the_library_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(chart_library, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="-m pip install plotly"):
        chart_library.compressed_script()


def test_a_run_on_a_cpu_has_processes_not_gpus(recipes):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    record = replace(trained(recipes), config=config)
    on_cpu = replace(record, result=replace(record.result, gpu="cpu"))
    assert "TFLOP/s per process" in sentences(on_cpu)[1]
    caption = named(training_charts(on_cpu), "memory-kinds").captions[0]
    assert "GiB per process, measured" in caption
    assert "leaves out Python and its libraries" in caption
    assert "GiB on the fullest GPU" in named(training_charts(trained(recipes)), "memory-kinds").captions[0]
    assert "Nothing differs from the recipe" in configuration(on_cpu)
