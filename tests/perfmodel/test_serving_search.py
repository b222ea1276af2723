"""Search of serving settings: limits are kept, layouts fill the GPUs, impossible limits say what is least."""

from dataclasses import replace

import pytest

from llmb.config.parallel_layout import check_serving
from llmb.config.spec import Parallel
from llmb.perfmodel.serving_time.serving_predictor import predict_serving
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.tune.serving_candidate import ServingFront
from llmb.perfmodel.tune.serving_reasons import serving_changes, token_changes
from llmb.perfmodel.tune.serving_search import PRECISION, search_serving
from llmb.perfmodel.tune.serving_space import serving_layouts

LIMITS = {"ttft_ms": 500.0, "tpot_ms": 50.0}


def engine_of(model: str, **changes: object) -> ServingSetup:
    fields = {"gpu": "h200", "dtype": "fp8", "isl": 1024, "osl": 1024, "concurrency": 1} | changes
    return ServingSetup(shape=find_model(model), **fields)


@pytest.fixture(scope="module")
def search():
    return search_serving(engine_of("llama3.1-70b"), 8, LIMITS)


@pytest.mark.parametrize("model", ["llama3.1-70b", "deepseek-v3"])
def test_layouts_divide_the_model_and_their_engines_fill_the_gpus(model):
    shape = find_model(model).model
    layouts = list(serving_layouts(shape, 8, 16, {}))
    assert layouts
    for layout in layouts:
        ranks = layout["tp"] * layout["attention_dp"]
        assert 16 % (ranks * layout["pp"]) == 0
        assert ranks <= 8
        check_serving(Parallel(tp=ranks, pp=layout["pp"], ep=layout["ep"]), shape, layout["attention_dp"] > 1)
        assert layout["ep"] * layout["moe_tp"] == ranks if shape.experts else layout["ep"] == 1
    assert {layout["tp"] for layout in serving_layouts(shape, 8, 16, {"tp": 2})} <= {2}


def test_every_candidate_keeps_the_limits_and_the_best_has_the_most_throughput(search):
    assert search.candidates
    assert search.candidates[0] in search.pareto
    for candidate in search.candidates:
        assert candidate.prediction.ttft_ms <= 500
        assert candidate.prediction.tpot_ms <= 50
        assert candidate.tokens_per_s_per_gpu <= search.candidates[0].tokens_per_s_per_gpu


def test_the_concurrency_of_the_best_is_the_last_within_the_limits(search):
    setup = search.candidates[0].setup
    more = round(setup.concurrency * (1 + 2 * PRECISION)) + 1
    beyond = predict_serving(replace(setup, concurrency=more, max_batch_size=more))
    assert beyond.ttft_ms > 500 or beyond.tpot_ms > 50


def test_limits_that_nothing_keeps_name_the_least():
    outcome = search_serving(engine_of("llama3.1-70b"), 8, {"tpot_ms": 0.1})
    assert not outcome.candidates
    least = outcome.least["tpot_ms"]
    assert least.setup.concurrency == 1
    assert least.prediction.tpot_ms > 0.1


def test_weights_that_do_not_fit_are_said_so():
    outcome = search_serving(engine_of("llama3.1-405b", gpu="h100", dtype="bf16"), 8, {})
    assert (outcome.candidates, outcome.predicted) == ((), 0)
    assert "GiB for its weights" in outcome.misfit


def test_fixed_load_and_batch():
    fixed = {"concurrency": 64, "max_num_tokens": 8192}
    outcome = search_serving(engine_of("llama3.1-8b"), 1, {}, fixed)
    assert {c.setup.concurrency for c in outcome.candidates} == {64}
    assert {c.setup.max_num_tokens for c in outcome.candidates} == {8192}
    assert max(c.setup.max_batch_size for c in outcome.candidates) == 64  # more would stay empty
    single = search_serving(engine_of("llama3.1-8b"), 1, {}, fixed | {"max_batch_size": 16})
    assert [c.setup.max_batch_size for c in single.candidates] == [16]


def test_loads_that_are_surpassed_by_far_are_left_out_and_the_pareto_set_is_whole(monkeypatch):
    base = engine_of("qwen3-30b-a3b", engine="native", isl=256, osl=128)
    quick = search_serving(base, 2, {"tpot_ms": 30.0})
    monkeypatch.setattr(ServingFront, "is_hopeless", lambda *_: False)
    whole = search_serving(base, 2, {"tpot_ms": 30.0})
    assert quick.predicted < whole.predicted
    assert [c.setup for c in quick.pareto] == [c.setup for c in whole.pareto]
    assert quick.candidates[:3] == whole.candidates[:3]


def test_the_settings_to_start_from_are_a_candidate():
    start = engine_of("llama3.1-8b", concurrency=1000, max_batch_size=777, max_num_tokens=5000)
    for limits, fixed in (({"tpot_ms": 1e3}, {}), ({}, {"concurrency": 1000})):
        setups = [candidate.setup for candidate in search_serving(start, 1, limits, fixed).candidates]
        assert setups.count(start) == 1
        assert {setup.max_num_tokens for setup in setups} >= {5000, 8192}
    assert start not in [c.setup for c in search_serving(start, 1, {}, {"max_batch_size": 512}).candidates]


def test_reasons_account_for_all_of_the_difference(search):
    first, last = search.candidates[0], search.candidates[-1]
    changes = token_changes(last, first)
    total = 1e3 / first.tokens_per_s_per_gpu - 1e3 / last.tokens_per_s_per_gpu
    assert sum(changes.values()) == pytest.approx(total, abs=0.1 * 1e3 / last.tokens_per_s_per_gpu)
    assert serving_changes(first.setup, first.setup) == {}
