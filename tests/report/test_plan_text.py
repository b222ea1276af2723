"""A plan in tables and words: every figure of the document, published ones beside ours, dashes for the unknown."""

from dataclasses import replace

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import Request
from llmb.config.spec import OutOfCore
from llmb.errors import ConfigError
from llmb.report.config_summary import describe
from llmb.report.plan_figures import Cut, PlanFigures, as_data, plan_figures
from llmb.report.plan_text import CUT, KINDS, RATES, describe_plan, expectations


@pytest.fixture(scope="module")
def config(recipes):
    return resolve(recipes["outofcore_llama3"], Request(size="8b", dtype="bf16", gpus=1, proxy="small"))


@pytest.fixture
def figures(config) -> PlanFigures:
    """As if this CPU had been measured: a step of 2 s, of which the device computes 1.9."""
    work = config.workload
    timed = replace(work.prediction, step_s=2.0, compute_s=1.9, inbound_s=1.0, outbound_s=0.5)
    return plan_figures(replace(config, workload=replace(work, prediction=timed)))


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    block = next(part for part in text.split("\n\n") if part.startswith(heading + " "))
    return [line.split() for line in block.splitlines()[2:]]


def test_every_figure_of_the_document_has_a_line(figures):
    text = describe_plan(figures)
    assert [" ".join(row)[: len(CUT[name][0])] for row, name in zip(rows(text, "plan"), CUT, strict=True)] == [
        said for said, _ in CUT.values()
    ]
    assert set(CUT) == set(Cut.__dataclass_fields__)


def test_published_figures_stand_beside_ours_and_what_they_lack_is_a_dash(figures):
    text = describe_plan(replace(figures, published={"chunk_size": 16384}))
    assert rows(text, "plan")[0][:4] == ["chunk", "size", "256", "16,384"]
    assert rows(text, "plan")[1][:5] == ["chunks", "per", "round", "4", "-"]
    assert "published" not in describe_plan(figures)


def test_memory_adds_up_to_the_peak(figures):
    *kinds, peak, budget = rows(describe_plan(figures), "memory")
    for column, side in ((-2, figures.device_bytes), (-1, figures.host_bytes)):
        shown = sum(float(row[column]) for row in kinds if row[column] != "-")
        assert shown == pytest.approx(float(peak[column]), rel=1e-3)
        assert float(peak[column]) == pytest.approx(sum(side.values()) / 2**30, rel=1e-3)
    assert budget == ["budget", "1", "0.5"]
    assert set(figures.device_bytes) | set(figures.host_bytes) <= set(KINDS)


@pytest.mark.parametrize(
    ("lanes", "said"),
    [
        ({"compute_s": 1.98}, "computation bounds it: the device computes 99.0 % of the time"),
        ({"inbound_s": 1.96}, "the link bounds it: the device waits 5.0 % of the time, while copies to the device"),
        ({"outbound_s": 1.99}, "while copies from the device take 99.5 % of it"),
        ({}, "order bounds it: the device waits 5.0 % of the time for copies that cannot begin sooner"),
    ],
)
def test_a_sentence_says_what_bounds_it(config, lanes, said):
    work = config.workload
    usual = {"step_s": 2.0, "compute_s": 1.9, "inbound_s": 1.0, "outbound_s": 0.5}
    expected = replace(work.prediction, **(usual | lanes))
    figures = plan_figures(replace(config, workload=replace(work, prediction=expected)))
    assert said in figures.bound
    assert figures.bound[1:] in describe_plan(figures)


def test_times_that_nobody_knows_are_dashes(config):
    text = describe_plan(plan_figures(config))
    expected = {row[0]: row for row in rows(text, "expected of a step")}
    assert expected["throughput"][1] == expected["MFU"][1] == expected["HFU"][1] == "-"
    assert "bounds it" not in text


def test_rates_are_named_with_their_source(figures):
    text = describe_plan(figures)
    assert text.endswith(f"({figures.rates['source']})")
    assert set(figures.rates) == {*RATES, "gpu", "source"}


def test_data_has_the_published_names_at_the_top(figures):
    assert set(Cut.__dataclass_fields__) <= set(as_data(figures))
    assert "cut" not in as_data(figures)


def test_show_prints_the_plan_and_not_its_data(config):
    text = describe(config, "python -m llmb.offload config.json")
    assert "where it rests" in text
    assert "levels" not in text
    assert "resident_params" in text


def test_the_head_of_a_page_has_a_few_of_them(figures):
    found = dict(expectations(figures))
    assert found["predicted"] == "2 s a step"
    assert found["global batch"] == "2 sequences, 2,048 tokens"


def test_other_runs_have_no_plan(recipes, config):
    other = resolve(recipes["pretrain_llama3.1"], Request(size="8b", dtype="fp32", gpus=1, proxy="small"))
    with pytest.raises(ConfigError, match=r"plans are made for out-of-core runs; .* is of kind training"):
        plan_figures(other)
    assert isinstance(config.workload, OutOfCore)
    with pytest.raises(ConfigError, match="has no plan"):
        plan_figures(replace(config, workload=replace(config.workload, plan=None)))
