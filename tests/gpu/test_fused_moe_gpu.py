"""Fused MoE on a GPU at the widths of DeepSeek and Grok-1: numbers, CUDA graphs, no synchronization."""

from typing import NamedTuple

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, randn, relative_error
from torch import Tensor

from llmb.config.model import Model, MoEConfig
from llmb.ops.moe.align_triton import choose_block_size
from llmb.ops.moe.expert_weights import ExpertFormat, ExpertWeights, empty_expert_weights, fill_expert_rows
from llmb.ops.moe.fused_moe import Routing, fused_moe
from llmb.ops.moe.router import route, router_scores
from llmb.ops.quant.activation_quant import quantize_activation
from llmb.serve.layers.served_moe import ServedRouter
from llmb.serve.weights.weight_source import WeightShard

pytestmark = NEEDS_GPU

BF16 = torch.bfloat16
EXPERT_FORMATS: tuple[ExpertFormat, ...] = ("plain", "per_token", "1x128", "nvfp4", "mxfp4")


class Sizes(NamedTuple):
    experts: int
    hidden: int
    width: int
    top_k: int
    activation: str


DEEPSEEK = Sizes(32, 7168, 2048, 8, "silu")
GPT_OSS = Sizes(32, 2880, 2880, 4, "swigluoai")
GROK = Sizes(2, 6144, 16384, 2, "gelu")  # a quarter of the experts, half their width


def random_expert_weights(shape: tuple[int, int, int], expert_format: ExpertFormat, seed: int) -> ExpertWeights:
    weights = empty_expert_weights(shape, expert_format, BF16, GPU)
    generator = torch.Generator(GPU).manual_seed(seed)
    for expert in range(shape[0]):
        fill_expert_rows(weights, expert, 0, torch.randn(shape[1:], device=GPU, generator=generator, dtype=BF16) * 0.02)
    return weights


def gate_up_and_down(sizes: Sizes, expert_format: ExpertFormat) -> tuple[ExpertWeights, ExpertWeights]:
    gate_up = random_expert_weights((sizes.experts, 2 * sizes.width, sizes.hidden), expert_format, 1)
    return gate_up, random_expert_weights((sizes.experts, sizes.hidden, sizes.width), expert_format, 2)


def with_bias(weights: ExpertWeights, seed: int) -> ExpertWeights:
    return weights._replace(bias=randn(*weights.values.shape[:2], seed=seed))


def routing_of(tokens: int, sizes: Sizes) -> Routing:
    """Return uneven routing: low experts are selected several times as often as high ones."""
    generator = torch.Generator(GPU).manual_seed(3)
    preference = torch.rand(tokens, sizes.experts, device=GPU, generator=generator)
    preference -= 0.5 * torch.arange(sizes.experts, device=GPU) / sizes.experts
    weights = torch.rand(tokens, sizes.top_k, device=GPU, generator=generator)
    return Routing(weights, preference.topk(sizes.top_k).indices, sizes.experts)


def random_tokens(tokens: int, sizes: Sizes) -> Tensor:
    return randn(tokens, sizes.hidden, seed=4)


@pytest.mark.parametrize(
    ("sizes", "expert_format"),
    [
        *((sizes, expert_format) for sizes in (DEEPSEEK, GROK) for expert_format in EXPERT_FORMATS),
        *((GPT_OSS, expert_format) for expert_format in ("plain", "mxfp4")),
    ],
    ids=str,
)
def test_fused_moe_matches_the_reference_at_full_width(sizes: Sizes, expert_format: ExpertFormat) -> None:
    gate_up, down = gate_up_and_down(sizes, expert_format)
    if sizes is GPT_OSS:
        gate_up, down = with_bias(gate_up, 5), with_bias(down, 5)
    for tokens in (1, 64, 300, 4000) if sizes is GPT_OSS else (1, 64, 512, 1500):  # with 4,000 MXFP4 is widened first
        x, routing = quantize_activation(random_tokens(tokens, sizes), gate_up.quant_format), routing_of(tokens, sizes)
        actual = fused_moe(x, routing, gate_up, down, sizes.activation, BF16)
        expected = fused_moe.reference(x, routing, gate_up, down, sizes.activation, BF16)
        # Rounding to bf16 between the GEMMs; in fp8 a number near a tie may be rounded either way.
        bound = 0.01 if gate_up.quant_format == "plain" else 0.02
        assert relative_error(actual, expected) < bound, (tokens, relative_error(actual, expected))
        assert relative_error(actual[-1], expected[-1]) < bound, tokens


@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
def test_all_block_sizes_agree(expert_format: ExpertFormat) -> None:
    sizes = DEEPSEEK._replace(experts=8)
    gate_up, down = gate_up_and_down(sizes, expert_format)
    x, routing = quantize_activation(random_tokens(200, sizes), gate_up.quant_format), routing_of(200, sizes)
    # Numbers of experts that select each of the block sizes.
    outs = {}
    for experts in (8, 40, 80, 200):
        outs[choose_block_size(200 * 8, experts)] = fused_moe(
            x, routing._replace(experts=experts), gate_up, down, "silu", BF16
        )
    assert sorted(outs) == [16, 32, 64, 128]
    for rows, out in outs.items():
        assert relative_error(out, outs[16]) < (0.005 if gate_up.quant_format == "plain" else 0.02), rows


@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
def test_replayed_graph_has_the_same_bits_for_new_routing(expert_format: ExpertFormat) -> None:
    sizes = DEEPSEEK._replace(experts=8)
    gate_up, down = gate_up_and_down(sizes, expert_format)
    x_NC, routing = random_tokens(16, sizes), routing_of(16, sizes)
    x = quantize_activation(x_NC, gate_up.quant_format)
    fused_moe(x, routing, gate_up, down, "silu", BF16)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_NC = fused_moe(x, routing, gate_up, down, "silu", BF16)
    later = torch.randint(0, 8, routing.topk_ids_NK.shape, device=GPU).sort(dim=1).values
    for chosen in (
        routing.topk_ids_NK.clone(),
        torch.arange(8, device=GPU).expand_as(later),
        later[:, :1].expand_as(later),
    ):
        routing.topk_ids_NK.copy_(chosen)
        graph.replay()
        assert torch.equal(out_NC, fused_moe(x, routing, gate_up, down, "silu", BF16))


def test_route_matches_the_reference_for_many_tokens() -> None:
    rule = MoEConfig(count=256, top_k=8, ffn=1, groups=8, top_groups=4, score="sigmoid", scale=2.5)
    logits_NE = randn(8192, 256, seed=5, dtype=torch.float32)
    bias_E = torch.linspace(-0.1, 0.1, 256, device=GPU)
    topk_weights_NK, topk_ids_NK = route(logits_NE, bias_E, rule)
    torch.testing.assert_close(topk_weights_NK.sum(dim=1), torch.full((8192,), 2.5, device=GPU))
    _, expected_NK = route.reference(logits_NE, bias_E, rule)
    actual, expected = (ids.sort(dim=1).values for ids in (topk_ids_NK, expected_NK))
    different_N = (actual != expected).any(dim=1)
    assert different_N.sum() <= 8  # scores closer than their rounding
    corrected_NE = router_scores(logits_NE, rule) + bias_E
    actual_sums, expected_sums = (corrected_NE.gather(1, ids).sum(dim=1)[different_N] for ids in (actual, expected))
    torch.testing.assert_close(actual_sums, expected_sums, rtol=1e-5, atol=0)


class RouterWeights:
    """The weight of a router, and no bias."""

    weight = (0.02 * torch.randn(256, 7168, generator=torch.Generator().manual_seed(6))).to(BF16)

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        return self.weight.to(GPU) if name.endswith("weight") else torch.zeros(256, device=GPU)


@pytest.mark.parametrize("tokens", [1, 300])
def test_bf16_router_scores_in_fp32(tokens: int) -> None:
    rule = MoEConfig(count=256, top_k=8, ffn=1, score="sigmoid", renormalise=False)
    model = Model(
        name="a router", architecture="deepseek", layers=1, hidden=7168, ffn=1, heads=1, kv_heads=1, head_dim=2,
        vocab=2, experts=rule,
    )  # fmt: skip
    x_NC = random_tokens(tokens, DEEPSEEK)
    topk_weights_NK, topk_ids_NK = ServedRouter(RouterWeights(), "router", model)(x_NC, None)
    scores_NE = (x_NC.double() @ RouterWeights.weight.to(GPU).double().T).sigmoid()
    assert (topk_weights_NK - scores_NE.gather(1, topk_ids_NK)).abs().max() < 1e-5  # bf16 scores: 1e-3
