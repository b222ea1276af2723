"""Sweeps as table, csv and chart: marks, notes, answers of tiers; a chart that is whole, legible and says the same."""

import csv
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from math import exp

import pytest

from llmb.report.page.sweep_page import sweep_page
from llmb.report.pareto_chart import COLOURS, DASHES, HEIGHT, MARKERS, WIDTH, pareto_chart
from llmb.report.sweep_table import sweep_csv, sweep_text
from llmb.results.result import Caution, Result
from llmb.results.sweep.slo import parse_slo
from llmb.results.sweep.sweep_points import PointKey, SweepPoint
from llmb.results.sweep.sweep_result import conclude

SVG = "{http://www.w3.org/2000/svg}"


def point(load, variant="", repeat=1, late=False, **fields):
    rate = 1500 * (1 - exp(-load / 16))
    figures = {
        "status": "ok", "requests": 2 * load, "requests_failed": 0, "output_tokens_per_s": rate + repeat,
        "output_tokens_per_s_per_gpu": (rate + repeat) / 2, "output_tokens_per_s_per_user": rate / load,
        "ttft_ms": {"mean": 9.0 * load, "p50": 10.0 * load, "p99": 20.0 * load}, "tpot_ms": {"p50": 5.0, "p99": 8.0},
    }  # fmt: skip
    return SweepPoint(
        key=PointKey(load_kind="concurrency", load=load, variant=variant, repeat=repeat),
        result=Result(name="p", **{**figures, **fields}),
        folder="points/p",
        wall_s=3.0,
        client_refusal="late by 9 ms" if late else None,
    )


def sweep(*points, gpus=2, tiers="ttft=400ms"):
    limits = {"chat": parse_slo(tiers)} if tiers else {}
    return conclude("demo", points or [point(load) for load in (1, 2, 4, 8, 16, 32, 64)], limits, gpus, target="a < b")


def test_the_table_marks_pareto_knee_and_tiers():
    text = sweep_text(sweep())
    assert re.search(r"^ +16 .*Pareto( knee)? chat$", text, re.M)
    assert "chat (ttft p99 <= 400 ms): concurrency 16" in text
    assert "concurrency 32 does not: ttft p99 640 ms > 400 ms" in text
    assert text.count("knee") == 2  # the row and its definition
    assert "farthest above the line between the ends" in text


def test_unknown_gpus_and_failures_are_said():
    text = sweep_text(sweep(point(1), point(2, requests_failed=3), gpus=None))
    assert "GPUs unknown: --gpus" in text
    assert "tok/s/GPU" not in text
    assert "concurrency 2: 3 requests failed" in text


def test_everything_that_speaks_against_a_load_is_said():
    cached = Caution(code="PREFIX_CACHED", text="90 % of the input tokens came from the server's prefix cache")
    result = sweep(point(1, warnings=(cached,)), point(2, requests_failed=3, lengths_wrong=5, late=True))
    page = sweep_page(result)
    for line in (
        "concurrency 1: 90 % of the input tokens came from the server",
        "concurrency 2: 3 requests failed",
        "concurrency 2: 5 outputs do not have the requested length",
    ):
        assert line in sweep_text(result)
        assert line in page
    assert 'id="doubts"' not in sweep_page(sweep())


def test_excluded_points_are_named_with_their_reason():
    failed = point(4, status="failed", reason="no request succeeded", output_tokens_per_s=None)
    result = sweep(point(1), point(2, late=True), failed)
    text = sweep_text(result)
    assert "excluded: concurrency 2: client: late by 9 ms" in text
    assert "excluded: concurrency 4: failed: no request succeeded" in text
    page = sweep_page(result)  # also where nothing can be hovered over, on a phone and on paper
    assert "The highest throughput that counts is" in page
    assert "2 of 3 loads are excluded: concurrency 2 (client: late by 9 ms); the table has the other reasons." in page


def test_repeats_show_their_noise():
    text = sweep_text(sweep(*(point(load, repeat=repeat) for load in (1, 2) for repeat in (1, 2, 3))))
    assert "+- %" in text
    assert "95 % confidence interval of output tokens/s over 3 repeats" in text


def test_a_sweep_without_points_and_an_unfinished_one():
    assert sweep_text(conclude("demo", [], {})) == "demo: no point was measured"
    assert "not finished" in sweep_text(conclude("demo", [point(1)], {}, finished=False))


def test_csv_has_every_figure_and_unknown_ones_empty():
    rows = list(csv.DictReader(io.StringIO(sweep_csv(sweep(point(1), point(2, late=True))))))
    assert [row["load"] for row in rows] == ["1", "2"]
    assert rows[0]["p99_ttft_ms"] == "20.0"
    assert rows[0]["p99_e2e_ms"] == ""
    assert (rows[0]["pareto"], rows[1]["pareto"], rows[1]["excluded"]) == ("1", "0", "client: late by 9 ms")


def test_the_chart_is_self_contained_and_inside_its_frame():
    chart = pareto_chart(sweep())
    root = ET.fromstring(chart)
    assert not re.search(r"(href|src|@import|<script)", chart)
    assert "http" not in chart.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme:dark" in chart
    assert root.find(f"{SVG}title").text.startswith("a < b")  # escaped
    assert "concurrency 16" in root.find(f"{SVG}desc").text
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x")) <= WIDTH
        assert 0 <= float(element.get("y")) <= HEIGHT
    for element in root.iter(f"{SVG}path"):
        if (move := element.get("transform")) is not None:
            x, y = map(float, re.findall(r"[\d.]+", move))
            assert 0 < x < WIDTH
            assert 0 < y < HEIGHT


def test_the_chart_draws_every_point_once_and_names_its_load():
    result = sweep(*(point(load) for load in (1, 4, 16)), point(64, late=True))
    root = ET.fromstring(pareto_chart(result))
    kinds = [
        element.get("class").split()[0]
        for element in root.iter(f"{SVG}path")
        if element.find(f"{SVG}title") is not None
    ]
    assert sorted(kinds) == ["bad", "set", "set", "set"]
    labels = {element.text.split()[0] for element in root.iter(f"{SVG}text") if "label" in (element.get("class") or "")}
    assert labels == {"1", "4", "16", "64"}
    assert (root.find(f".//{SVG}circle") is not None) == (result.knee is not None)


def test_variants_differ_in_colour_marker_and_dashes():
    """None of the three is needed alone: on paper, in grey, or with few points."""
    assert len(set(COLOURS)) == len(set(DASHES)) == len(set(MARKERS)) == 8
    points = [point(load, variant) for variant in ("a=1", "a=2") for load in (1, 4, 16)]
    root = ET.fromstring(pareto_chart(sweep(*points)))
    fronts = [e for e in root.iter(f"{SVG}path") if (e.get("class") or "").startswith("front")]
    assert {e.get("class") for e in fronts} == {"front v0", "front v1"}
    assert {"a=1", "a=2"} <= {e.text for e in root.iter(f"{SVG}text")}


def test_labels_do_not_cover_each_other():
    root = ET.fromstring(pareto_chart(sweep(*(point(load) for load in range(1, 60)))))
    boxes = []
    for e in root.iter(f"{SVG}text"):
        css = (e.get("class") or "").split()
        if "label" in css:
            width = len(e.text) * 6.0
            x = float(e.get("x")) - (width if "end" in css else 0)
            boxes.append((x, float(e.get("y")), width))
    assert len(boxes) > 10
    for i, (x, y, w) in enumerate(boxes):
        assert all(x + w < x2 or x > x2 + w2 or abs(y - y2) > 9 for x2, y2, w2 in boxes[:i])


@pytest.mark.parametrize("points", [[], [point(1)], [point(1, output_tokens_per_s_per_user=None)]])
def test_few_points_make_a_chart(points):
    ET.fromstring(pareto_chart(conclude("demo", points, {}, 1)))


def test_the_same_sweep_gives_the_same_bytes():
    assert pareto_chart(sweep()) == pareto_chart(replace(sweep()))
