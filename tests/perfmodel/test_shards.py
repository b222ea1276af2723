"""What ranks have adds up to the model: weights, layers and FLOPs."""

import pytest
from published_models import ALL, GROK, LLAMA_70B, LLAMA_405B, NEMOTRON

from llmb.config.spec import Machine, Model, Parallel, Precision, RunConfig, Training
from llmb.perfmodel import flops
from llmb.perfmodel.shards import part_weights, rank_flops, rank_parameters, rank_parts


def run(model: Model, ga: int = 1, recompute_layers: int = 0, **split) -> RunConfig:
    parallel = Parallel(**split)
    work = Training(seqlen=8192, mbs=1, gbs=ga * parallel.dp, ga=ga, recompute_layers=recompute_layers)
    return RunConfig(
        name="test", target="test", size="test", model=model, parallel=parallel, precision=Precision(dtype="bf16"),
        machine=Machine(gpu="h100", gpus=parallel.world_size, gpus_per_node=8), workload=work,
    )  # fmt: skip


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.name)
def test_the_weights_of_one_rank_are_the_model(model: Model) -> None:
    config = run(model)
    (part,) = rank_parts(config)
    corrections = model.layers - model.experts.dense_layers if model.experts and model.experts.score == "sigmoid" else 0
    buffers = corrections * model.experts.count if model.experts else 0  # of routers: no gradient moves them
    assert sum(weight.size for weight in part_weights(model, part)) == flops.parameters(model) - buffers
    assert rank_parameters(config) == flops.parameters(model) - buffers


@pytest.mark.parametrize("model", [LLAMA_70B, LLAMA_405B, NEMOTRON], ids=lambda model: model.name)
def test_the_flops_of_all_ranks_are_the_steps(model: Model) -> None:
    vp = 4 if model is LLAMA_405B else None
    config = run(model, ga=8, dp=2, tp=2, pp=4, vp=vp)
    stages = sum(rank_flops(config, rank) for rank in range(4)) * config.parallel.dp * config.parallel.tp
    assert stages == pytest.approx(16 * flops.train_flops_per_sequence(model, 8192, "causal"), rel=1e-12)


def test_recomputed_layers_cost_a_third_more() -> None:
    plain, again = (rank_flops(run(LLAMA_70B, recompute_layers=layers, tp=2)) for layers in (0, 80))
    head = 3 * 8192 * LLAMA_70B.hidden * LLAMA_70B.vocab
    assert again - head == pytest.approx((plain - head) * 8 / 6)


def test_recomputed_layers_by_hand_compute_no_attention_again() -> None:
    m = LLAMA_70B
    plain, again = (rank_flops(run(m, recompute_layers=layers)) for layers in (0, 80))
    queries, output, gate_and_up = (
        m.hidden * m.heads * m.head_dim,
        m.heads * m.head_dim * m.hidden,
        2 * m.hidden * m.ffn,
    )
    assert again - plain == pytest.approx(80 * 8192 * 2 * (queries + output + gate_and_up))


def test_the_stages_of_a_pipeline_have_every_layer_once() -> None:
    config = run(LLAMA_405B, ga=8, pp=8, vp=8)
    layers = [layer for rank in range(8) for part in rank_parts(config, rank) for layer in part.layers]
    assert sorted(layers) == list(range(126))


def test_replicas_and_experts_share_what_divides() -> None:
    split = {"dp": 8, "tp": 4, "ep": 8, "etp": 4}
    whole, shared = run(GROK), run(GROK, **split)
    routed = flops.parameter_breakdown(GROK)["experts"]
    router = flops.parameter_breakdown(GROK)["router"]
    rest = rank_parameters(whole) - routed - router
    assert rank_parameters(shared) == pytest.approx(routed / 32 + router + rest / 32, rel=1e-4)  # norms over dp only
