"""A plan in tables and words: every figure of the document, published ones beside ours, dashes for the unknown."""

from dataclasses import replace

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import OutOfCore
from llmb.errors import ConfigError
from llmb.report.config_summary import describe
from llmb.report.plan_figures import PlanFigures, StepLayout, as_data, plan_figures
from llmb.report.plan_text import DISK_RATES, KINDS, LAYOUT, RATES, describe_plan, expectations


@pytest.fixture(scope="module")
def config(recipes):
    return resolve(recipes["outofcore_llama3"], RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small"))


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


def test_every_layout_figure_has_a_line(figures):
    text = describe_plan(figures)
    assert [" ".join(row)[: len(LAYOUT[name][0])] for row, name in zip(rows(text, "plan"), LAYOUT, strict=True)] == [
        label for label, _ in LAYOUT.values()
    ]
    assert set(LAYOUT) == set(StepLayout.__dataclass_fields__)


def test_published_figures_have_a_column_and_missing_ones_are_dashes(figures):
    text = describe_plan(replace(figures, published={"chunk_size": 16384}))
    assert rows(text, "plan")[0][:4] == ["chunk", "size", "256", "16,384"]
    assert rows(text, "plan")[1][:5] == ["chunks", "per", "round", "4", "-"]
    assert "published" not in describe_plan(figures)


def test_memory_adds_up_to_the_peak(figures):
    *kinds, peak, budget = rows(describe_plan(figures), "memory")
    for column, side in ((-2, figures.device_bytes), (-1, figures.host_bytes)):
        total = sum(float(row[column]) for row in kinds if row[column] != "-")
        assert total == pytest.approx(float(peak[column]), rel=1e-3)
        assert float(peak[column]) == pytest.approx(sum(side.values()) / 2**30, rel=1e-3)
    assert budget == ["budget", "1", "0.5"]
    assert set(figures.device_bytes) | set(figures.host_bytes) <= set(KINDS)


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ({"compute_s": 1.98}, "compute-bound: the device computes 99.0 % of the time"),
        ({"inbound_s": 1.96}, "link-bound: the device waits 5.0 % of the time, while copies to the device"),
        ({"outbound_s": 1.99}, "while copies from the device take 99.5 % of it"),
        ({}, "latency-bound: the device waits 5.0 % of the time for copies that cannot begin sooner"),
    ],
)
def test_sentence_names_the_bound(config, times, sentence):
    work = config.workload
    usual = {"step_s": 2.0, "compute_s": 1.9, "inbound_s": 1.0, "outbound_s": 0.5}
    prediction = replace(work.prediction, **(usual | times))
    figures = plan_figures(replace(config, workload=replace(work, prediction=prediction)))
    assert sentence in figures.bound
    assert figures.bound[1:] in describe_plan(figures)


def test_unknown_times_are_dashes(config):
    text = describe_plan(plan_figures(config))
    predicted = {row[0]: row for row in rows(text, "prediction of a step")}
    assert predicted["throughput"][1] == predicted["MFU"][1] == predicted["HFU"][1] == "-"
    assert "-bound:" not in text


def test_rates_are_named_with_their_source(figures):
    text = describe_plan(figures)
    assert text.endswith(f"({figures.rates['source']})")
    no_pace = {"gpu", "source", "bus_gbs", "device_memory_bytes"}
    assert set(figures.rates) == {*RATES, *DISK_RATES} | no_pace


def test_data_has_the_published_names_at_the_top(figures):
    assert set(StepLayout.__dataclass_fields__) <= set(as_data(figures))
    assert "layout" not in as_data(figures)


def test_show_prints_the_plan_and_not_its_data(config):
    text = describe(config, "python -m llmb.offload config.json")
    assert "resident on device" in text
    assert "levels" not in text
    assert "resident_params" in text


def test_head_of_a_page_has_a_few_figures(figures):
    lines = dict(expectations(figures))
    assert lines["predicted"] == "2 s per step"
    assert lines["global batch"] == "2 sequences, 2,048 tokens"


def test_runs_without_a_plan_are_refused(recipes, config):
    training = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    with pytest.raises(ConfigError, match=r"plans are made for out-of-core runs; .* is of kind training"):
        plan_figures(training)
    assert isinstance(config.workload, OutOfCore)
    with pytest.raises(ConfigError, match="has no plan"):
        plan_figures(replace(config, workload=replace(config.workload, plan=None)))
