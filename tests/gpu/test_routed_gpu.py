"""Routed experts on a real GPU at DeepSeek's and Grok-1's widths: right numbers, no waits, the same bits from a graph."""

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from llmb.infer.experts import ServedRouter
from llmb.kernels.forms import Form, in_form
from llmb.kernels.routed import Stacked, Visits, empty_stack, fill_rows, routed_mlp, routed_mlp_reference
from llmb.kernels.routed_triton import deal, rows_of_tile
from llmb.spec import Experts, Model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
FORMS: tuple[Form, ...] = ("plain", "rows8", "groups8")


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


def stack(shape: tuple[int, int, int], form: Form, seed: int) -> Stacked:
    made = empty_stack(shape, form, BF16, GPU)
    generator = torch.Generator(GPU).manual_seed(seed)
    for expert in range(shape[0]):
        fill_rows(made, expert, 0, torch.randn(shape[1:], device=GPU, generator=generator, dtype=BF16) * 0.02)
    return made


def stacks(sizes: Sizes, form: Form) -> tuple[Stacked, Stacked]:
    both = stack((sizes.experts, 2 * sizes.width, sizes.hidden), form, 1)
    return both, stack((sizes.experts, sizes.hidden, sizes.width), form, 2)


def visits_of(tokens: int, sizes: Sizes) -> Visits:
    """Uneven: low experts are visited several times as often as high ones."""
    generator = torch.Generator(GPU).manual_seed(3)
    wish = torch.rand(tokens, sizes.experts, device=GPU, generator=generator)
    wish -= 0.5 * torch.arange(sizes.experts, device=GPU) / sizes.experts
    weights = torch.rand(tokens, sizes.top_k, device=GPU, generator=generator)
    return Visits(weights, wish.topk(sizes.top_k).indices, sizes.experts)


def some(tokens: int, sizes: Sizes) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(4)
    return torch.randn(tokens, sizes.hidden, device=GPU, generator=generator).to(BF16)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [DEEPSEEK, GROK], ids=["deepseek", "grok1"])
def test_kernels_agree_with_the_reference_at_true_widths(sizes: Sizes, form: Form) -> None:
    both, down = stacks(sizes, form)
    for tokens in (1, 64, 512, 1500):
        x, visits = in_form(some(tokens, sizes), form), visits_of(tokens, sizes)
        found = routed_mlp(x, visits, both, down, sizes.activation, BF16)
        wanted = routed_mlp_reference(x, visits, both, down, sizes.activation, BF16)
        # Roundings to bf16 between the products; to 8 bits there, a number between two may go to the other.
        bound = 0.01 if form == "plain" else 0.02
        assert relative(found, wanted) < bound, (tokens, relative(found, wanted))
        assert relative(found[-1], wanted[-1]) < bound, tokens


@pytest.mark.parametrize("form", FORMS)
def test_every_tile_gives_the_same(form: Form) -> None:
    sizes = DEEPSEEK._replace(experts=8)
    both, down = stacks(sizes, form)
    x, visits = in_form(some(200, sizes), form), visits_of(200, sizes)
    # As many experts as make each of the tiles the one that is chosen.
    outs = {}
    for of_all in (8, 40, 80, 200):
        outs[rows_of_tile(200 * 8, of_all)] = routed_mlp(x, visits._replace(experts=of_all), both, down, "silu", BF16)
    assert sorted(outs) == [16, 32, 64, 128]
    for rows, out in outs.items():
        assert relative(out, outs[16]) < 0.005, rows


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_gives_the_same_bits_for_other_tokens(form: Form) -> None:
    sizes = DEEPSEEK._replace(experts=8)
    both, down = stacks(sizes, form)
    x_NC, visits = some(16, sizes), visits_of(16, sizes)
    x = in_form(x_NC, form)
    routed_mlp(x, visits, both, down, "silu", BF16)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_NC = routed_mlp(x, visits, both, down, "silu", BF16)
    later = torch.randint(0, 8, visits.chosen_NK.shape, device=GPU).sort(dim=1).values
    for chosen in (visits.chosen_NK.clone(), torch.arange(8, device=GPU).expand_as(later), later[:, :1].expand_as(later)):
        visits.chosen_NK.copy_(chosen)
        graph.replay()
        assert torch.equal(out_NC, routed_mlp(x, visits, both, down, "silu", BF16))


@pytest.mark.parametrize(("tokens", "experts"), [(1, 256), (64, 256), (8192, 256), (8192, 8)])
def test_every_visit_is_dealt_once(tokens: int, experts: int) -> None:
    visits = visits_of(tokens, DEEPSEEK._replace(experts=experts, top_k=min(8, experts)))
    chosen_M = visits.chosen_NK.flatten()
    dealt = deal(visits.chosen_NK, 0, experts, rows_of_tile(len(chosen_M), experts))
    whose_P = dealt.experts_T.repeat_interleave(dealt.rows)
    there_P = (whose_P >= 0) & (dealt.visits_P < len(chosen_M))
    assert torch.equal(dealt.visits_P[there_P].sort().values, torch.arange(len(chosen_M), device=GPU).int())
    assert torch.equal(chosen_M[dealt.visits_P[there_P].long()].int(), whose_P[there_P])


def test_a_step_never_waits_for_the_device() -> None:
    both, down = stacks(DEEPSEEK._replace(experts=8), "groups8")
    x, visits = in_form(some(16, DEEPSEEK), "groups8"), visits_of(16, DEEPSEEK._replace(experts=8))
    routed_mlp(x, visits, both, down, "silu", BF16)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            routed_mlp(x, visits, both, down, "silu", BF16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [str(w.message) for w in caught if "synchronizing" in str(w.message)]
