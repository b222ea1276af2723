"""Routed experts on a real GPU at DeepSeek's and Grok-1's widths: right numbers, no waits, and graphs."""

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from llmb.config.spec import Model, MoEConfig
from llmb.ops.moe.align_triton import choose_block_size, moe_align_block_size
from llmb.ops.moe.expert_weights import ExpertFormat, ExpertWeights, empty_expert_weights, fill_expert_rows
from llmb.ops.moe.fused_moe import Routing, fused_moe
from llmb.ops.moe.router import route, router_scores
from llmb.ops.quant.activation_quant import quantize_activation
from llmb.serve.layers.served_moe import ServedRouter
from llmb.serve.weights.weight_source import WeightShard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
KINDS: tuple[ExpertFormat, ...] = ("plain", "per_token", "1x128", "nvfp4")


class Sizes(NamedTuple):
    experts: int
    hidden: int
    width: int
    top_k: int
    activation: str


DEEPSEEK = Sizes(32, 7168, 2048, 8, "silu")
GROK = Sizes(2, 6144, 16384, 2, "gelu")  # a quarter of the experts, half their width


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    torch.cuda.empty_cache()


def stack(shape: tuple[int, int, int], kind: ExpertFormat, seed: int) -> ExpertWeights:
    made = empty_expert_weights(shape, kind, BF16, GPU)
    generator = torch.Generator(GPU).manual_seed(seed)
    for expert in range(shape[0]):
        fill_expert_rows(made, expert, 0, torch.randn(shape[1:], device=GPU, generator=generator, dtype=BF16) * 0.02)
    return made


def stacks(sizes: Sizes, kind: ExpertFormat) -> tuple[ExpertWeights, ExpertWeights]:
    both = stack((sizes.experts, 2 * sizes.width, sizes.hidden), kind, 1)
    return both, stack((sizes.experts, sizes.hidden, sizes.width), kind, 2)


def visits_of(tokens: int, sizes: Sizes) -> Routing:
    """Uneven: low experts are visited several times as often as high ones."""
    generator = torch.Generator(GPU).manual_seed(3)
    wish = torch.rand(tokens, sizes.experts, device=GPU, generator=generator)
    wish -= 0.5 * torch.arange(sizes.experts, device=GPU) / sizes.experts
    weights = torch.rand(tokens, sizes.top_k, device=GPU, generator=generator)
    return Routing(weights, wish.topk(sizes.top_k).indices, sizes.experts)


def some(tokens: int, sizes: Sizes) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(4)
    return torch.randn(tokens, sizes.hidden, device=GPU, generator=generator).to(BF16)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [DEEPSEEK, GROK], ids=["deepseek", "grok1"])
def test_kernels_agree_with_the_reference_at_true_widths(sizes: Sizes, kind: ExpertFormat) -> None:
    both, down = stacks(sizes, kind)
    for tokens in (1, 64, 512, 1500):
        x, visits = quantize_activation(some(tokens, sizes), both.form), visits_of(tokens, sizes)
        found = fused_moe(x, visits, both, down, sizes.activation, BF16)
        wanted = fused_moe.reference(x, visits, both, down, sizes.activation, BF16)
        # Roundings to bf16 between the products; to 8 bits there, a number between two may go to the other.
        bound = 0.01 if both.form == "plain" else 0.02
        assert relative(found, wanted) < bound, (tokens, relative(found, wanted))
        assert relative(found[-1], wanted[-1]) < bound, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_gives_the_same(kind: ExpertFormat) -> None:
    sizes = DEEPSEEK._replace(experts=8)
    both, down = stacks(sizes, kind)
    x, visits = quantize_activation(some(200, sizes), both.form), visits_of(200, sizes)
    # As many experts as make each of the tiles the one that is chosen.
    outs = {}
    for of_all in (8, 40, 80, 200):
        outs[choose_block_size(200 * 8, of_all)] = fused_moe(x, visits._replace(experts=of_all), both, down, "silu", BF16)
    assert sorted(outs) == [16, 32, 64, 128]
    for rows, out in outs.items():
        assert relative(out, outs[16]) < (0.005 if both.form == "plain" else 0.02), rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_gives_the_same_bits_for_other_tokens(kind: ExpertFormat) -> None:
    sizes = DEEPSEEK._replace(experts=8)
    both, down = stacks(sizes, kind)
    x_NC, visits = some(16, sizes), visits_of(16, sizes)
    x = quantize_activation(x_NC, both.form)
    fused_moe(x, visits, both, down, "silu", BF16)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_NC = fused_moe(x, visits, both, down, "silu", BF16)
    later = torch.randint(0, 8, visits.topk_ids_NK.shape, device=GPU).sort(dim=1).values
    for chosen in (
        visits.topk_ids_NK.clone(),
        torch.arange(8, device=GPU).expand_as(later),
        later[:, :1].expand_as(later),
    ):
        visits.topk_ids_NK.copy_(chosen)
        graph.replay()
        assert torch.equal(out_NC, fused_moe(x, visits, both, down, "silu", BF16))


@pytest.mark.parametrize(("tokens", "experts"), [(1, 256), (64, 256), (8192, 256), (8192, 8)])
def test_every_visit_is_dealt_once(tokens: int, experts: int) -> None:
    visits = visits_of(tokens, DEEPSEEK._replace(experts=experts, top_k=min(8, experts)))
    chosen_M = visits.topk_ids_NK.flatten()
    dealt = moe_align_block_size(visits.topk_ids_NK, 0, experts, choose_block_size(len(chosen_M), experts))
    whose_P = dealt.expert_ids_T.repeat_interleave(dealt.block_size)
    there_P = (whose_P >= 0) & (dealt.sorted_token_ids_P < len(chosen_M))
    assert torch.equal(dealt.sorted_token_ids_P[there_P].sort().values, torch.arange(len(chosen_M), device=GPU).int())
    assert torch.equal(chosen_M[dealt.sorted_token_ids_P[there_P].long()].int(), whose_P[there_P])


def test_the_choice_of_many_tokens() -> None:
    rule = MoEConfig(count=256, top_k=8, ffn=1, groups=8, top_groups=4, score="sigmoid", scale=2.5)
    logits_NE = torch.randn(8192, 256, device=GPU, generator=torch.Generator(GPU).manual_seed(5))
    bias_E = torch.linspace(-0.1, 0.1, 256, device=GPU)
    topk_weights_NK, topk_ids_NK = route(logits_NE, bias_E, rule)
    torch.testing.assert_close(topk_weights_NK.sum(dim=1), torch.full((8192,), 2.5, device=GPU))
    _, wanted_NK = route.reference(logits_NE, bias_E, rule)
    found, wanted = (one.sort(dim=1).values for one in (topk_ids_NK, wanted_NK))
    other_N = (found != wanted).any(dim=1)
    assert other_N.sum() <= 8  # scores that differ by less than their rounding
    corrected_NE = router_scores(logits_NE, rule) + bias_E
    gained, lost = (corrected_NE.gather(1, one).sum(dim=1)[other_N] for one in (found, wanted))
    torch.testing.assert_close(gained, lost, rtol=1e-5, atol=0)


class Given:
    """A router's weight, and no correction."""

    weight = (0.02 * torch.randn(256, 7168, generator=torch.Generator().manual_seed(6))).to(BF16)

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        return self.weight.to(GPU) if name.endswith("weight") else torch.zeros(256, device=GPU)


@pytest.mark.parametrize("tokens", [1, 300])
def test_a_router_in_bf16_scores_as_one_in_fp32(tokens: int) -> None:
    rule = MoEConfig(count=256, top_k=8, ffn=1, score="sigmoid", renormalise=False)
    model = Model(
        name="a router", architecture="deepseek", layers=1, hidden=7168, ffn=1, heads=1, kv_heads=1, head_dim=2,
        vocab=2, experts=rule,
    )  # fmt: skip
    x_NC = some(tokens, DEEPSEEK)
    topk_weights_NK, topk_ids_NK = ServedRouter(Given(), "router", model)(x_NC, None)
    scores_NE = (x_NC.double() @ Given.weight.to(GPU).double().T).sigmoid()
    assert (topk_weights_NK - scores_NE.gather(1, topk_ids_NK)).abs().max() < 1e-5  # in bf16 it would be 1e-3


def test_a_step_never_waits_for_the_device() -> None:
    both, down = stacks(DEEPSEEK._replace(experts=8), "1x128")
    x, visits = quantize_activation(some(16, DEEPSEEK), "1x128"), visits_of(16, DEEPSEEK._replace(experts=8))
    fused_moe(x, visits, both, down, "silu", BF16)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fused_moe(x, visits, both, down, "silu", BF16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [str(w.message) for w in caught if "synchronizing" in str(w.message)]
