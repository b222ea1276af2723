"""Search of layouts: the best fits and is the fastest, recompute and offload are as little as needed."""

from dataclasses import replace

import pytest
from test_layout_space import run_of

from llmb.config.recipe import load_all, shipped
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Parallel
from llmb.perfmodel.hardware import GIB, GPUS
from llmb.perfmodel.memory_estimate import memory_estimate
from llmb.perfmodel.step_time.predictor import constants_of, predict, step_memory
from llmb.perfmodel.step_time.step_setup import setup_of
from llmb.perfmodel.step_time.waterfall import step_terms, step_work
from llmb.perfmodel.tune.layout_reasons import setting_changes, term_changes
from llmb.perfmodel.tune.layout_remedies import layout_remedies, least_memory
from llmb.perfmodel.tune.layout_search import StepTimes, search_layouts
from llmb.perfmodel.tune.layout_space import layout_space
from llmb.perfmodel.tune.memory_savings import (
    COPY_EFFICIENCY,
    FORWARD_FRACTION,
    USABLE_FRACTION,
    external_room,
    fitting_variants,
    with_recompute,
)
from llmb.perfmodel.tune.native_layouts import native_config, native_room, runs_natively


@pytest.fixture(scope="module")
def search():
    return search_layouts(run_of("llama3.1-70b"), {})


def test_the_best_is_the_fastest_that_fits(search):
    best, limit = search.candidates[0], USABLE_FRACTION * GPUS["h100"].memory_bytes
    assert search.pareto[0] == best
    assert best.seconds == pytest.approx(predict(best.setup).step_time_s)
    assert best.memory == pytest.approx(step_memory(best.setup).total)
    assert all(c.memory <= limit and c.seconds >= best.seconds for c in search.candidates)
    fitting = [s for s in layout_space(run_of("llama3.1-70b"), {}) if step_memory(s).total <= limit]
    assert best.seconds <= min(predict(setup).step_time_s for setup in fitting) + 1e-9


@pytest.mark.parametrize("engine", ["torchtitan", "native"])
def test_layouts_that_differ_in_their_schedule_share_the_work_of_a_rank(engine):
    base = run_of("grok1", gpus=64, engine=engine)
    setups, times = list(layout_space(base, {"tp": 2})), StepTimes()
    assert [times.seconds(setup) for setup in setups] == [
        sum(step_terms(step_work(setup), constants_of(setup)).values()) for setup in setups
    ]
    assert len(times.works) < len(setups) / 2


def test_as_few_layers_as_needed_are_recomputed():
    setup = replace(run_of("llama3.1-8b", gpus=8), mbs=2)
    room = external_room(setup)
    (variant, estimate), *others = fitting_variants(setup, {}, room)
    assert not others  # PCIe: no offload of eight GPUs
    assert estimate.total <= room.limit
    assert variant.recompute_layers > 1
    assert room.estimate(with_recompute(setup, variant.recompute_layers - 1)).total > room.limit
    assert not list(fitting_variants(setup, {"recompute_layers": 1}, room))  # fixed below what it needs


def test_megatron_recomputes_as_many_layers_in_every_virtual_stage():
    """Its recompute_num_layers counts in each of them: 405B in NVFP4 with pp 16, vp 8 and 1 recomputes every layer."""
    split = Parallel(tp=4, pp=8, vp=5, dp=2)
    setup = replace(run_of("llama3.1-70b"), parallel=split, recompute="full", recompute_layers=1)
    assert [replace(setup, recompute_layers=n).recomputed_layers for n in (1, 5, 6, 99)] == [5, 5, 10, 10]
    assert replace(setup, recompute_layers=None).recomputed_layers == 10
    assert replace(setup, engine="torchtitan", recompute_layers=3).recomputed_layers == 3
    assert replace(setup, parallel=replace(split, vp=None), recompute_layers=3).recomputed_layers == 3
    five, ten = (predict(replace(setup, recompute_layers=n)) for n in (5, 10))
    assert predict(setup) == five
    assert ten.terms["recompute"] == pytest.approx(2 * five.terms["recompute"])
    assert ten.memory_gib < five.memory_gib
    searched = search_layouts(run_of("llama3.1-70b"), {"tp": 2, "pp": 8, "vp": 5}).candidates
    assert searched
    assert {c.setup.recompute_layers for c in searched} <= {None, 5, 10}


def test_offload_is_proposed_over_coherent_links_and_hides_behind_the_forward():
    base = run_of("llama3.1-70b", gpu="gb200", gbs=128)
    offloading = [c for c in search_layouts(base, {"fsdp": True}).candidates if c.setup.offload_layers]
    assert offloading
    for candidate in offloading:
        forward = FORWARD_FRACTION * candidate.seconds / candidate.setup.ga
        copied = step_memory(candidate.setup).host
        assert copied <= forward * COPY_EFFICIENCY * GPUS["gb200"].host_bandwidth
    assert not [c for c in search_layouts(run_of("llama3.1-70b"), {}).candidates if c.setup.offload_layers]


def test_nothing_fits_and_what_would():
    base = run_of("llama3.1-405b", gpus=8, gbs=8)
    outcome = search_layouts(base, {})
    assert not outcome.candidates
    assert outcome.smallest.memory == pytest.approx(least_memory(base, {}))
    assert outcome.smallest.memory > outcome.limit
    (remedy,) = layout_remedies(base, {})
    scale = int(remedy.removeprefix("--scale "))
    assert search_layouts(replace(base, gpus=scale, gbs=scale), {}).candidates
    assert not search_layouts(replace(base, gpus=scale // 2, gbs=scale // 2), {}).candidates


def test_the_native_engine_has_its_own_memory_and_refusals():
    recipe = load_all([shipped()])["pretrain_llama3.1"]
    config = resolve(recipe, RunRequest(size="8b", dtype="bf16", gpus=1, gpu="h200"))
    room, base = native_room(config), setup_of(config)
    outcome = search_layouts(base, {}, room, runs_natively(config))
    assert outcome.candidates
    assert outcome.candidates[0].seconds <= predict(base).step_time_s
    assert room.estimate(base).total == pytest.approx(memory_estimate(config).total)
    chosen = native_config(config, outcome.candidates[0].setup)
    assert chosen.workload.ga * chosen.workload.mbs == chosen.workload.gbs
    graphs = replace(config, workload=replace(config.workload, cuda_graphs=True))
    offloading = replace(base, offload_layers=2)
    assert runs_natively(config)(offloading)
    assert not runs_natively(graphs)(offloading)


def test_reasons_are_the_terms_and_settings_that_differ(search):
    before, after = run_of("llama3.1-70b"), search.candidates[0].setup
    terms = term_changes(predict(before).terms, predict(after).terms)
    assert list(terms) == sorted(terms, key=lambda name: -abs(terms[name]))
    total = predict(after).step_time_s - predict(before).step_time_s
    assert sum(terms.values()) == pytest.approx(total, abs=0.02 * predict(before).step_time_s)
    assert setting_changes(before, before) == {}
    assert all(old != new for old, new in setting_changes(before, after).values())


def test_limits_leave_room_beside_tensors():
    room = external_room(run_of("llama3.1-8b"))
    assert GPUS["h100"].memory_bytes / GIB - room.limit / GIB > 5  # CUDA context, NCCL buffers, fragmentation


def test_the_search_and_the_prediction_estimate_the_same_memory():
    for name in ("qwen3-30b-a3b", "llama3.1-8b"):
        setup = run_of(name)
        assert external_room(setup).estimate(setup) == step_memory(setup)
        assert predict(setup).memory_gib * GIB == pytest.approx(step_memory(setup).total)
