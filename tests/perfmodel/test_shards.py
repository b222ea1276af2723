"""Shards of all ranks add up to the model: weights, layers and FLOPs."""

from itertools import chain

import pytest
from published_models import ALL, GROK, LLAMA_70B, LLAMA_405B, NEMOTRON
from test_memory_estimate import run as run_config
from test_memory_estimate import train

from llmb.config.model import Model
from llmb.config.spec import Parallel, RunConfig
from llmb.perfmodel import flops, params
from llmb.perfmodel.shards import (
    Weight,
    rank_flops,
    rank_parameters,
    rank_stages,
    replicated_values,
    stage_units,
    weight_buckets,
)


def run(model: Model, ga: int = 1, recompute_layers: int = 0, **split) -> RunConfig:
    gpus = Parallel(**split).world_size
    return run_config(model, "h100", gpus, train(ga=ga, recompute_layers=recompute_layers), **split)


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.name)
def test_weights_of_one_rank_are_the_model(model: Model) -> None:
    config = run(model)
    (stage,) = rank_stages(config)
    corrections = model.layers - model.experts.dense_layers if model.experts and model.experts.score == "sigmoid" else 0
    buffers = corrections * model.experts.count if model.experts else 0  # of routers: no gradient moves them
    assert (
        sum(weight.size for unit in stage_units(model, stage) for weight in unit) == params.parameters(model) - buffers
    )
    assert rank_parameters(config) == params.parameters(model) - buffers


@pytest.mark.parametrize("model", [LLAMA_70B, LLAMA_405B, NEMOTRON], ids=lambda model: model.name)
def test_flops_of_all_ranks_are_those_of_the_step(model: Model) -> None:
    vp = 4 if model is LLAMA_405B else None
    config = run(model, ga=8, dp=2, tp=2, pp=4, vp=vp)
    stages = sum(rank_flops(config, rank) for rank in range(4)) * config.parallel.dp * config.parallel.tp
    assert stages == pytest.approx(16 * flops.train_flops_per_sequence(model, 8192, "causal"), rel=1e-12)


def test_recomputation_adds_a_third_of_the_flops() -> None:
    plain, recomputed = (rank_flops(run(NEMOTRON, recompute_layers=layers, tp=2)) for layers in (0, NEMOTRON.layers))
    head = 3 * 8192 * NEMOTRON.hidden * NEMOTRON.vocab
    assert recomputed - head == pytest.approx((plain - head) * 8 / 6)


@pytest.mark.parametrize("tp", [1, 2])
def test_recomputed_explicit_layers_do_not_recompute_attention(tp: int) -> None:
    m = LLAMA_70B
    plain, recomputed = (rank_flops(run(m, recompute_layers=layers, tp=tp)) for layers in (0, 80))
    queries_and_output, gate_and_up = 2 * m.hidden * m.heads * m.head_dim, 2 * m.hidden * m.ffn
    assert recomputed - plain == pytest.approx(80 * 8192 * 2 * (queries_and_output + gate_and_up) / tp)


def test_replicas_and_experts_are_sharded() -> None:
    """Norms and routers, in fp32, are whole on every rank."""
    whole, shared = run(GROK), run(GROK, dp=8, tp=4, ep=8, etp=4)
    (stage,) = rank_stages(whole)
    vectors = replicated_values(chain.from_iterable(stage_units(GROK, stage)), whole.parallel)
    assert vectors == params.parameter_breakdown(GROK)["router"] + (2 * GROK.layers + 1) * GROK.hidden
    assert rank_parameters(shared) == (rank_parameters(whole) - vectors) / 32 + vectors


def test_buckets_are_padded_to_equal_aligned_shards() -> None:
    """Of 3 x 5 and 7 x 3 values, contiguous as the engine has them, and of 3 x 5 and 7 x 8, which begin at 16."""
    others = [Weight((9,)), Weight((2, 2), replicated=True)]
    for second, expected in (((7, 3), (16, 48, 16)), ((7, 8), (24, 72, 23))):
        weights = [Weight((3, 5)), Weight(second), *others]
        (bucket,) = weight_buckets(weights, Parallel(dp=3))
        assert (bucket.replicas, bucket.ranks) == ("replicas", 3)
        assert (bucket.shard, bucket.size, bucket.unpadded) == expected
        assert replicated_values(weights, Parallel(dp=3)) == 13


def test_buckets_are_those_of_the_ranks_that_hold_the_same() -> None:
    weights = [Weight((8, 8), 0), Weight((8, 8)), Weight((8, 8, 8), 1, routed=True)]
    for layout, expected in (
        ({"dp": 4}, {"replicas": (4, 64 + 64 + 512)}),
        ({"dp": 4, "tp": 2}, {"replicas": (4, 32), "stage": (8, 64 + 512)}),
        ({"dp": 4, "tp": 2, "ep": 4}, {"replicas": (4, 32), "stage": (8, 64), "edp": (2, 128)}),
    ):
        buckets = weight_buckets(weights, Parallel(**layout))
        assert {bucket.replicas: (bucket.ranks, bucket.size) for bucket in buckets} == expected
