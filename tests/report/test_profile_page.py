"""The page: whole, self-contained, the same for the same data, and clear about what it cannot show."""

import gzip
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from synthetic_timeline import small

from llmb.errors import ConfigError, LaunchError
from llmb.perfmodel.offload.stream_timeline import StreamTimeline, TimelineEvent
from llmb.report.timeline.profile_page import write_profile
from llmb.report.timeline.profile_table import rows
from llmb.report.timeline.tracks import Timeline

FIGURES = [("Chunk", "16384 tokens"), ("Rounds a step", "5")]
PICTURES = ["bwd_layers", "fwd_layers", "round_overview", "step_overhead", "step_overview", "training_overview"]


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.outside = [], [], []

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.ids += [named["id"]] if "id" in named else []
        self.outside += [v for k, v in attributes if k in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def single_event(start=0.0, end=1.0):
    return TimelineEvent(stream="compute", name="forward", start=start, end=end, step=0, phase="forward")


def test_the_folder_holds_the_page_six_pictures_and_the_trace(tmp_path):
    page = write_profile(tmp_path / "profile", small(), small("predicted"), "A run", FIGURES)
    assert page == tmp_path / "profile" / "profile.html"
    assert sorted(p.name for p in page.parent.iterdir()) == sorted(
        [*(f"{name}.svg" for name in PICTURES), "profile.html", "trace.json.gz"]
    )
    assert json.loads(gzip.decompress((page.parent / "trace.json.gz").read_bytes()))["traceEvents"]


def test_page_is_well_formed_and_self_contained(tmp_path):
    text = write_profile(tmp_path, small(), None, "A run", FIGURES).read_text()
    page = Balance()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert len(set(page.ids)) == len(page.ids)
    assert set(PICTURES) <= set(page.ids)
    assert "<script" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert len(text) < 3_000_000


def test_titles_and_figures_are_escaped(tmp_path):
    text = write_profile(tmp_path, small(), None, "<b>A & B", [("<i>", "a < b")]).read_text()
    assert "<h1>&lt;b&gt;A &amp; B</h1>" in text
    assert "<dt>&lt;i&gt;</dt><dd>a &lt; b</dd>" in text


def test_same_timelines_give_the_same_files(tmp_path):
    item, second = (write_profile(tmp_path / n, small(), small("predicted"), "A run", FIGURES).parent for n in "ab")
    assert {p.name: p.read_bytes() for p in item.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}


def test_the_table_gives_counts_times_and_rates_of_a_step():
    actual = {(row.stream, row.name): row.cells for row in rows(Timeline.of(small()), None)}
    assert actual["compute", "forward"] == ("32", "320 ms", "27 %", "600 TFLOP/s")  # 2 rounds x 8 layers x 2 chunks
    assert actual["inbound", "param"] == ("20", "160 ms", "14 %", "50.0 GB/s")
    assert actual["compute", "wait"][1] == "0 s"
    assert actual["compute", "update"][3] == "\u2013"


def test_table_has_the_prediction():
    actual = {
        (row.stream, row.name): row.cells
        for row in rows(Timeline.of(small()), Timeline.of(small("predicted", forward_s=0.008)))
    }
    assert actual["compute", "forward"][4:] == ("256 ms", "600 TFLOP/s", "+25.0 %")
    assert actual["inbound", "param"][4:] == ("160 ms", "50.0 GB/s", "0.0 %")
    fewer = {
        (row.stream, row.name): row.cells
        for row in rows(Timeline.of(small()), Timeline.of(small("predicted", recomputed=0)))
    }
    assert fewer["compute", "recompute"][4:] == ("\u2013",) * 3


def test_table_extrapolates_three_predicted_rounds_but_not_two():
    measured = Timeline.of(small(rounds=5))
    three, two = (Timeline.of(small("predicted", rounds=rounds)) for rounds in (3, 2))
    full, empty = ({(r.stream, r.name): r.cells for r in rows(measured, second)} for second in (three, two))
    assert full["compute", "forward"][4:] == ("800 ms", "600 TFLOP/s", "0.0 %")  # 5 x 8 x 2 x 10 ms
    assert empty["compute", "forward"][4:] == ("\u2013",) * 3


def test_single_event_gives_a_page(tmp_path):
    page = write_profile(tmp_path, StreamTimeline(source="measured", events=(single_event(),)), None, "One", [])
    assert sorted(p.stem for p in page.parent.glob("*.svg")) == ["step_overview", "training_overview"]
    assert "Nothing is copied" in page.read_text()


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((), "the measured timeline has no compute event"),
        ((TimelineEvent(stream="inbound", name="param", start=0, end=1, step=0, phase="forward"),), "no compute event"),
        ((single_event(1.0, 1.0),), "has no duration"),
    ],
    ids=["nothing", "copies alone", "no time"],
)
def test_timeline_that_cannot_be_drawn_is_refused(events, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        write_profile(tmp_path / "profile", StreamTimeline(source="measured", events=events), None, "Empty", [])
    assert not (tmp_path / "profile").exists()


def test_uncreatable_folder_is_named(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    with pytest.raises(LaunchError, match="cannot make the folder"):
        write_profile(tmp_path / "profile", small(), None, "A run", [])


def test_a_browser_shows_the_page(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is installed")
    page = write_profile(tmp_path, small(), None, "A run", FIGURES)
    shot = tmp_path / "shot.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user"]
    command = [browser, *options, f"--screenshot={shot}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert shot.stat().st_size > 10_000
