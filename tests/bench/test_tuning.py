"""`bench/tuning.py`: cases of recipes and published rows, ratios, reasons, and the tables of docs/tuning.md."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
tuning = import_module("tuning")
PUBLISHED = Path(__file__).parent.parent / "golden" / "published_training_rows.csv"


@pytest.fixture(scope="module")
def outcomes():
    recipes = [case for case in tuning.recipe_cases() if case.model == "Llama-3.1-70B" and case.setup.gpu == "h100"]
    assert [case.setup.gpus for case in recipes] == [64, 1024]
    native = [case for case in tuning.recipe_cases() if case.config is not None and case.setup.gpus == 1]
    return [tuning.tune(case) for case in (recipes[0], native[0])]


def test_the_ratio_is_that_of_predicted_times(outcomes):
    for outcome in outcomes:
        assert outcome.ratio == pytest.approx(outcome.own_s / outcome.best.seconds)
    assert 1.05 < outcomes[0].ratio < tuning.AIM  # its code recomputes nothing, though its table prints five layers
    assert outcomes[1].ratio == pytest.approx(1.0, abs=0.05)


def test_rows_made_for_the_native_engine_have_its_memory(outcomes):
    native = outcomes[1]
    assert native.case.config.engine == "native"
    assert native.own_memory <= native.limit


def test_published_rows_are_taken_once_per_layout_at_two_scales():
    cases = list(tuning.published_cases(PUBLISHED))
    assert len(cases) == len(set(cases)) > 10
    kinds = {case.kind for case in cases}
    assert "Megatron, pre-training" in kinds
    fewer = [case for case in cases if case.kind == "Megatron, models with fewer layers"]
    assert all(case.setup.layer_count < case.setup.shape.model.layers for case in fewer)


def test_tables_have_a_reason_for_every_slow_layout(outcomes):
    text = tuning.report(outcomes)
    assert "| rows of the recipes | 2 |" in text
    assert "0 of 2 rows of the recipes;" in text
    assert "pp 8 -> 2" in text
    assert outcomes[0].cause == "pipeline bubble, imbalance and sends"
    assert "| pipeline bubble, imbalance and sends | 1 | 0 | 0 |" in text


def test_the_document_has_the_marks_of_the_tables():
    document = tuning.DOCUMENT.read_text()
    assert document.index(tuning.BEGIN) < document.index(tuning.END)
