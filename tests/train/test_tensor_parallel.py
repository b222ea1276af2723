"""Tensor parallelism: collectives, loss and embedding equal one process, and each rank holds only its shards."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from torch import Tensor, nn
from training_ranks import on_ranks

from llmb.config.spec import Model, RunConfig
from llmb.models.chunked_loss import chunked_cross_entropy
from llmb.ops.embedding.embedding_autograd import fused_embedding
from llmb.train.parallel.activation_collectives import all_gather, all_reduce, reduce_scatter
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import init_mesh
from llmb.train.parallel.parameter_shard import ParameterShard, box_of, shard_of
from llmb.train.parallel.vocab_parallel import vocab_parallel_cross_entropy
from llmb.train.parallelize import build_model_parts
from llmb.train.train_support import supported_workload


def config_of(model: Model, **changes: Any) -> RunConfig:
    # With some other seeds a weight's first gradient is zero but for rounding, and Adam takes a full step for it.
    few: dict[str, Any] = {"steps": 2, "mbs": 2, "gbs": 4, "ga": 2, "lr": 1e-3, "seed": 11}
    return changed(replace(CONFIG, model=model), **few | changes)


# Replicated: norms of residuals and latents, routers, down projections of MLA, experts; everything else is sharded.
REPLICATED = re.compile(
    r"norm.weight|layers.\d.(norm|attention_norm|mlp_norm|mlp.router).weight"
    r"|layers.\d.attention.(q_norm|kv_norm|q_down|kv_down).weight|layers.\d.mlp.(gate|up|down).weight \[8,.*"
)


def local_weights(_rank: int, config: RunConfig) -> dict[str, tuple[ParameterShard, Tensor]]:
    (model_part,) = build_model_parts(config, supported_workload(config), init_mesh(config))
    sharded_parameters(model_part).gather_all()
    return {name: (shard_of(parameter), parameter.detach()) for name, parameter in model_part.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "deepseek", "nemotron_h"])
def test_each_tp_rank_holds_its_shard(name: str) -> None:
    alone = config_of(SMALL_MODELS[name])
    (network,) = build_model_parts(alone, supported_workload(alone), init_mesh(alone))
    ranks = on_ranks(2, local_weights, config_of(SMALL_MODELS[name], tp=2))
    assert all(weights.keys() == dict(network.named_parameters()).keys() for weights in ranks)
    for path, whole in network.named_parameters():
        full_name = path + f" {[*whole.shape]}" * (whole.ndim > 2)
        parts = 1 if REPLICATED.fullmatch(full_name) else 2
        assert len({weights[path][0].offset for weights in ranks}) == parts, path
        for shard, held in (weights[path] for weights in ranks):
            assert shard.shape == whole.shape
            assert held.numel() * parts == whole.numel(), path
            assert torch.equal(held, box_of(whole, shard, held.shape)), path


def with_gradients(rank: int, work: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output for a rank's slice of x, and its gradient for weights that depend on index and rank."""
    mesh = init_mesh(config_of(SMALL_MODELS["llama"], tp=2)).submesh("tp")
    x_local = x[rank].clone().requires_grad_()
    out = work(x_local, mesh)
    weights = torch.arange(1.0, out.numel() + 1).view_as(out) * (rank + 1)
    (gradient,) = torch.autograd.grad((out * weights).sum(), x_local)
    return out.detach(), gradient


COLLECTIVES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], list[Tensor]]]] = {
    "all_gather": (partial(all_gather, dim=1), lambda x: [torch.cat([*x], dim=1)] * 2),
    "reduce_scatter": (partial(reduce_scatter, dim=1), lambda x: [*x.sum(0).chunk(2, dim=1)]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_and_its_gradient_equal_one_process(name: str) -> None:
    """The gradient of a rank's slice is that of the loss summed over ranks, which one process can compute."""
    over_ranks, at_once = COLLECTIVES[name]
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected = at_once(x)
    total = sum((out * torch.arange(1.0, out.numel() + 1).view_as(out) * n).sum() for n, out in enumerate(expected, 1))
    (gradients,) = torch.autograd.grad(total, x)  # type: ignore[arg-type]
    for rank, (out, gradient) in enumerate(on_ranks(2, with_gradients, over_ranks, x.detach())):
        torch.testing.assert_close(out, expected[rank].detach())
        torch.testing.assert_close(gradient, gradients[rank])


def test_all_reduce_gradient_is_identity() -> None:
    x = torch.randn(2, 3)
    for out, gradient in on_ranks(2, with_equal_losses, x):
        torch.testing.assert_close(out, x.sum(0))
        torch.testing.assert_close(gradient, torch.tensor([1.0, 2.0, 3.0]))


def with_equal_losses(rank: int, x: Tensor) -> tuple[Tensor, Tensor]:
    mesh = init_mesh(config_of(SMALL_MODELS["llama"], tp=2)).submesh("tp")
    x_local = x[rank].clone().requires_grad_()
    out = all_reduce(x_local, mesh)
    (gradient,) = torch.autograd.grad((out * torch.tensor([1.0, 2.0, 3.0])).sum(), x_local)
    return out.detach(), gradient


def split_loss(rank: int, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> list[Tensor]:
    mesh = init_mesh(config_of(SMALL_MODELS["llama"], tp=2)).submesh("tp")
    x_local, rows = (
        tensor.chunk(2, dim)[rank].clone().requires_grad_() for tensor, dim in ((x_BTC, 1), (weight_VC, 0))
    )
    loss = vocab_parallel_cross_entropy(x_local, rows, labels_BT, mesh, first=rank * len(rows), chunk=5)
    return [loss.detach(), *torch.autograd.grad(loss * 3, (x_local, rows))]


@pytest.mark.slow
def test_vocab_parallel_loss_equals_one_process() -> None:
    generator = torch.Generator().manual_seed(2)
    x_BTC, weight_VC = torch.randn(3, 8, 6, generator=generator), torch.randn(10, 6, generator=generator) * 5
    labels_BT = torch.randint(10, (3, 8), generator=generator)
    first, second = on_ranks(2, split_loss, x_BTC, weight_VC, labels_BT)
    expected_x, expected_weight = x_BTC.clone().requires_grad_(), weight_VC.clone().requires_grad_()
    loss = chunked_cross_entropy(expected_x, expected_weight, labels_BT)
    (3 * loss).backward()
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[0], loss.detach())
    torch.testing.assert_close(torch.cat((first[1], second[1]), dim=1), expected_x.grad)
    torch.testing.assert_close(torch.cat((first[2], second[2])), expected_weight.grad)


def test_vocab_parallel_embedding_masks_other_ranks() -> None:
    embedding = nn.Embedding(4, 3)
    x = fused_embedding(torch.tensor([[3, 4], [7, 8]]), embedding.weight, 4)
    assert torch.equal(x[0, 1], embedding.weight[0])
    assert torch.equal(x[1, 0], embedding.weight[3])
    assert not x[0, 0].any()
    assert not x[1, 1].any()
    x.sum().backward()
    assert torch.equal(embedding.weight.grad, torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None].expand(4, 3))
