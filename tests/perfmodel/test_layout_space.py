"""Layouts of a search: everything divides, and what clusters and engines impose holds."""

from dataclasses import replace

import pytest

from llmb.config.parallel_layout import check_model, check_sequence
from llmb.config.spec import Parallel
from llmb.errors import ConfigError
from llmb.perfmodel.shapes.model_catalog import find_model
from llmb.perfmodel.step_time.step_setup import StepSetup
from llmb.perfmodel.tune.fixed_fields import split_settings
from llmb.perfmodel.tune.layout_space import check_fixed, layout_space


def run_of(model: str, gpu: str = "h100", gpus: int = 64, **changes: object) -> StepSetup:
    fields = {"dtype": "fp8", "seqlen": 8192, "mbs": 1, "gbs": 128, "parallel": Parallel()} | changes
    return StepSetup(shape=find_model(model), gpu=gpu, gpus=gpus, **fields)


@pytest.mark.parametrize("model", ["llama3.1-70b", "grok1-314b", "nemotron-h-56b", "deepseek-v3"])
def test_every_layout_divides_model_sequence_batch_and_gpus(model):
    base = run_of(model)
    setups = list(layout_space(base, {}))
    assert len(setups) == len(set(setups)) > 20
    for setup in setups[::7]:
        split = setup.parallel
        assert split.world_size == 64
        assert split.tp <= 8  # of an NVLink domain
        assert setup.gbs == setup.mbs * setup.ga * setup.dp
        check_model(split, base.shape.model)
        check_sequence(base.seqlen, split)
        assert split.pp == 1 or setup.ga >= split.pp
        assert (split.vp or 1) == 1 or setup.ga % split.pp == 0
        assert not split.fsdp or (split.pp == 1 and base.shape.model.experts is None)
        assert split.etp in (1, split.tp)
        assert split.cp == 1 or base.seqlen // split.cp >= 1024


def test_a_single_expert_is_on_every_rank():
    base = run_of("grok1-314b", gpus=2)
    model = base.shape.model
    single = replace(model, experts=replace(model.experts, count=1, top_k=1))
    layouts = {setup.parallel for setup in layout_space(replace(base, shape=replace(base.shape, model=single)), {})}
    assert Parallel(dp=2) in layouts
    assert Parallel(dp=2) not in {setup.parallel for setup in layout_space(base, {})}


def test_the_published_layouts_are_in_the_space():
    for layout, model in (
        (Parallel(dp=2, tp=4, pp=8, vp=5), "llama3.1-70b"),
        (Parallel(dp=1, tp=4, pp=8, cp=2, vp=8, ep=8), "grok1-314b"),
        (Parallel(dp=64, fsdp=True), "llama3.1-8b"),
        (Parallel(dp=8, tp=8), "nemotron-h-56b"),
    ):
        base = run_of(model, gbs=128)
        assert any(setup.parallel == layout and setup.mbs == 1 for setup in layout_space(base, {})), layout


def test_interleaving_never_makes_the_fullest_rank_fuller():
    stages = {(s.parallel.pp, s.parallel.vp) for s in layout_space(run_of("llama3.1-405b", gpus=1024, gbs=1024), {})}
    assert (8, 8) in stages  # 126 layers: at most 16 a rank, as without
    assert (8, 5) not in stages  # 4 layers in each of 5 stages would be 20
    hybrid = {s.parallel.vp for s in layout_space(run_of("nemotron-h-56b"), {})}
    assert hybrid == {None}


def test_stages_of_a_hybrid_have_equally_many_layers_in_megatron_before_2026():
    """Nemotron-H 56B has 118 layers, which 4 does not divide."""
    base = run_of("nemotron-h-56b")
    assert {setup.parallel.pp for setup in layout_space(base, {})} == {1, 2}
    recent = replace(base, engine="megatron-bridge-2026")
    assert 4 in {setup.parallel.pp for setup in layout_space(recent, {})}


def test_fixed_dimensions_stay():
    setups = list(layout_space(run_of("llama3.1-70b"), {"tp": 2, "pp": 4, "vp": 1, "fsdp": False, "mbs": 2}))
    assert setups
    assert {(s.parallel.tp, s.parallel.pp, s.parallel.vp, s.parallel.fsdp, s.mbs) for s in setups} == {
        (2, 4, None, False, 2)
    }


def test_torchtitan_shards_pipelines_and_experts_too():
    base = replace(run_of("deepseek-v3"), engine="torchtitan")
    assert any(s.parallel.fsdp and s.parallel.pp > 1 for s in layout_space(base, {}))


def test_megatron_of_2024_does_not_shard_weights():
    assert any(setup.parallel.fsdp for setup in layout_space(run_of("llama3.1-70b", engine="megatron"), {}))
    assert not any(setup.parallel.fsdp for setup in layout_space(run_of("llama3.1-70b", engine="megatron-2024"), {}))


def test_groups_of_a_published_row_are_not_searched():
    base = run_of("llama3.1-70b", parallel=Parallel(fsdp=True), fsdp_ranks=8)
    assert {setup.fsdp_ranks for setup in layout_space(base, {})} == {None}


def test_a_fixed_dimension_that_divides_nothing_names_what_does():
    with pytest.raises(ConfigError, match=r"tp 3 does not divide the 64 heads.*tp could be 1, 2, 4, 8"):
        check_fixed(run_of("llama3.1-70b"), {"tp": 3})
    with pytest.raises(ConfigError, match="pp = 7 does not divide 64 GPUs"):
        check_fixed(run_of("llama3.1-70b"), {"pp": 7})


def test_settings_are_split_into_fixed_dimensions_and_the_run():
    fixed, others = split_settings(["tp=4", "gbs=512", "fsdp=true", "offload_layers=0", "vp=none"])
    assert fixed == {"tp": 4, "fsdp": True, "offload_layers": 0, "vp": 1}
    assert others == ["gbs=512"]
    for text, message in (("tp=0", "tp must be"), ("tp", "expected FIELD=VALUE"), ("fsdp=maybe", "value of fsdp")):
        with pytest.raises(ConfigError, match=message):
            split_settings([text])
