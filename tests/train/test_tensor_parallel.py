"""Tensor parallelism: ranks that share weights train as one process does, and none holds more than its part."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from ranks import Trained, on_ranks, trained
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from llmb.config.spec import Model, RunConfig
from llmb.errors import ConfigError
from llmb.models.chunked_loss import chunked_cross_entropy
from llmb.train.parallel.activation_collectives import gathered, scattered_sum, summed
from llmb.train.parallel.mesh import open_mesh
from llmb.train.parallel.vocab_parallel import RowsEmbedding, split_cross_entropy
from llmb.train.parallelize import ready_parts
from llmb.train.precision import CastLinear, Fp8Linear
from llmb.train.train_support import supported_workload

# In fp32 only the order of sums differs. In bf16 each rank rounds its summand of what a block makes, in fp8 its slices
# have scales of their own; Adam makes whole steps even of gradients that are mostly rounding.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp8": 5e-2}
MODELS = SMALL_MODELS | {
    "tied llama": replace(SMALL_MODELS["llama"], tied_embeddings=True),
    "four kv heads": replace(SMALL_MODELS["llama"], kv_heads=4),
}


def config_of(model: Model, **changes: Any) -> RunConfig:
    # By the seed. With some others one weight's first gradient is zero but for rounding: Adam makes a whole step of it.
    few: dict[str, Any] = {"steps": 2, "mbs": 2, "gbs": 4, "ga": 2, "lr": 1e-3, "seed": 11}
    return changed(replace(CONFIG, model=model), **few | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Trains a model by its name; the same run twice is one, unless it is counted."""

    @cache
    def run(name: str, tp: int, dtype: str = "fp32", recompute_layers: int = 0, count: int = 0) -> Trained:
        config = config_of(MODELS[name], tp=tp, dtype=dtype, recompute_layers=recompute_layers)
        return trained(config, tmp_path_factory.mktemp("run"))

    return run


@pytest.mark.parametrize("name", [*SMALL_MODELS, "tied llama"])
def test_two_ranks_train_as_one_process_does(run: Callable[..., Trained], name: str) -> None:
    assert run(name, tp=2).farthest(run(name, tp=1)) < TOLERANCE["fp32"]


@pytest.mark.parametrize("name", ["four kv heads", pytest.param("deepseek", marks=pytest.mark.matrix)])
def test_four_ranks_train_as_one_process_does(run: Callable[..., Trained], name: str) -> None:
    assert run(name, tp=4).farthest(run(name, tp=1)) < TOLERANCE["fp32"]


@pytest.mark.parametrize("name", ["deepseek", "nemotron_h"])
def test_recomputation_changes_no_bit(run: Callable[..., Trained], name: str) -> None:
    assert_same_bits(run(name, tp=2, recompute_layers=4), run(name, tp=2))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "name", ["nemotron_h", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama", "grok1", "deepseek"))]
)
def test_in_fewer_bits_the_courses_stay_near(run: Callable[..., Trained], name: str, dtype: str) -> None:
    assert run(name, tp=2, dtype=dtype).farthest(run(name, tp=1, dtype=dtype)) < TOLERANCE[dtype]


def test_the_same_seed_gives_the_same_bits(run: Callable[..., Trained]) -> None:
    assert_same_bits(run("deepseek", tp=2, count=1), run("deepseek", tp=2))


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert (one.losses, one.norms) == (other.losses, other.norms)
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


# What every rank has all of: norms of the stream and of latents, routers, narrow projections, experts; the rest is cut.
WHOLE = re.compile(
    r"norm.weight|layers.\d.(norm|attention_norm|mlp_norm|mlp.router).weight"
    r"|layers.\d.attention.(q_norm|kv_norm|q_down|kv_down).weight|layers.\d.mlp.(gate|up|down).weight \[8,.*"
)


def parts_held(_rank: int, config: RunConfig) -> dict[str, tuple[Tensor, torch.Size, Placement]]:
    (part,) = ready_parts(config, supported_workload(config), open_mesh(config))
    return {
        name: (parameter.to_local().detach(), parameter.shape, *parameter.placements)
        for name, parameter in part.named_parameters()
        if isinstance(parameter, DTensor)
    }


@pytest.mark.parametrize("name", ["llama", "deepseek", "nemotron_h"])
def test_a_rank_holds_its_part_of_the_same_weights(name: str) -> None:
    alone = config_of(MODELS[name])
    (network,) = ready_parts(alone, supported_workload(alone), open_mesh(alone))
    first, second = on_ranks(2, parts_held, config_of(MODELS[name], tp=2))
    assert first.keys() == second.keys() == dict(network.named_parameters()).keys()
    for path, whole in network.named_parameters():
        held, shape, placement = first[path]
        assert shape == whole.shape
        assert isinstance(placement, Replicate) == bool(WHOLE.fullmatch(path + f" {[*shape]}" * (len(shape) > 2))), path
        joined = held if isinstance(placement, Replicate) else torch.cat((held, second[path][0]), placement.dim)
        assert torch.equal(joined, whole), path


def with_gradients(rank: int, work: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """What a rank makes of its slice of x, and the gradient of that where every number weighs by its place and rank."""
    mesh = open_mesh(config_of(MODELS["llama"], tp=2)).sub("tp")
    own = x[rank].clone().requires_grad_()
    made = work(own, mesh)
    weights = torch.arange(1.0, made.numel() + 1).view_as(made) * (rank + 1)
    (gradient,) = torch.autograd.grad((made * weights).sum(), own)
    return made.detach(), gradient


EXCHANGES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], list[Tensor]]]] = {
    "gathered": (partial(gathered, dim=1), lambda x: [torch.cat([*x], dim=1)] * 2),
    "scattered sum": (partial(scattered_sum, dim=1), lambda x: [*x.sum(0).chunk(2, dim=1)]),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_and_its_gradients_are_those_of_all_ranks_at_once(name: str) -> None:
    """The gradient of a rank's slice is that of the sum over ranks, which one process can compute."""
    over_ranks, at_once = EXCHANGES[name]
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    wanted = at_once(x)
    total = sum(
        (made * torch.arange(1.0, made.numel() + 1).view_as(made) * n).sum() for n, made in enumerate(wanted, 1)
    )
    (gradients,) = torch.autograd.grad(total, x)  # type: ignore[arg-type]
    for rank, (made, gradient) in enumerate(on_ranks(2, with_gradients, over_ranks, x.detach())):
        torch.testing.assert_close(made, wanted[rank].detach())
        torch.testing.assert_close(gradient, gradients[rank])


def test_a_sum_that_all_ranks_go_on_with_gives_each_summand_its_gradient() -> None:
    x = torch.randn(2, 3)
    for made, gradient in on_ranks(2, with_equal_losses, x):
        torch.testing.assert_close(made, x.sum(0))
        torch.testing.assert_close(gradient, torch.tensor([1.0, 2.0, 3.0]))


def with_equal_losses(rank: int, x: Tensor) -> tuple[Tensor, Tensor]:
    mesh = open_mesh(config_of(MODELS["llama"], tp=2)).sub("tp")
    own = x[rank].clone().requires_grad_()
    made = summed(own, mesh)
    (gradient,) = torch.autograd.grad((made * torch.tensor([1.0, 2.0, 3.0])).sum(), own)
    return made.detach(), gradient


def split_loss(rank: int, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> list[Tensor]:
    mesh = open_mesh(config_of(MODELS["llama"], tp=2)).sub("tp")
    own, rows = (one.chunk(2, dim)[rank].clone().requires_grad_() for one, dim in ((x_BTC, 1), (weight_VC, 0)))
    loss = split_cross_entropy(own, rows, labels_BT, mesh, first=rank * len(rows), chunk=5)
    return [loss.detach(), *torch.autograd.grad(loss * 3, (own, rows))]


def test_the_loss_over_a_split_vocabulary_is_that_over_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    x_BTC, weight_VC = torch.randn(3, 8, 6, generator=generator), torch.randn(10, 6, generator=generator) * 5
    labels_BT = torch.randint(10, (3, 8), generator=generator)
    first, second = on_ranks(2, split_loss, x_BTC, weight_VC, labels_BT)
    wanted_x, wanted_weight = x_BTC.clone().requires_grad_(), weight_VC.clone().requires_grad_()
    loss = chunked_cross_entropy(wanted_x, wanted_weight, labels_BT)
    (3 * loss).backward()
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[0], loss.detach())
    torch.testing.assert_close(torch.cat((first[1], second[1]), dim=1), wanted_x.grad)
    torch.testing.assert_close(torch.cat((first[2], second[2])), wanted_weight.grad)


def test_an_embedding_of_some_rows_knows_nothing_of_the_others() -> None:
    embedding = RowsEmbedding(4, 3)
    embedding.first = 4
    found = embedding(torch.tensor([[3, 4], [7, 8]]))
    assert torch.equal(found[0, 1], embedding.weight[0])
    assert torch.equal(found[1, 0], embedding.weight[3])
    assert not found[0, 0].any()
    assert not found[1, 1].any()
    found.sum().backward()
    assert torch.equal(embedding.weight.grad, torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None].expand(4, 3))


def test_a_slice_that_8_bit_products_do_not_take_is_computed_in_16() -> None:
    whole, part = (Fp8Linear(64, width, bias=False) for width in (48, 24))
    part.weight, part.out_features = nn.Parameter(whole.weight[:24].detach()), whole.out_features
    x = torch.randn(32, 64).bfloat16()
    assert torch.equal(part(x), CastLinear.forward(part, x))
    assert not torch.equal(whole(x), CastLinear.forward(whole, x))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": 4}, "tp 4 does not divide the 2 key and value heads"),
        ({"tp": 2, "vocab": 127}, "tp 2 does not divide the 127 entries of the vocabulary"),
        ({"tp": 2, "seqlen": 31}, "seqlen 31 is not a multiple of tp 2"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        supported_workload(config_of(MODELS["llama"], **changes))
