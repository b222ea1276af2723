"""Tensor parallelism: the loss equals one process, and each rank holds only its shards."""

import re

import pytest
import torch
from small_models import SMALL_MODELS
from torch import Tensor
from training_ranks import build_job, layout_config, on_ranks

from llmb.config.spec import RunConfig
from llmb.models.chunked_loss import chunked_cross_entropy
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import init_mesh
from llmb.train.parallel.parameter_shard import ParameterShard, box_of, shard_of
from llmb.train.parallel.vocab_parallel import vocab_parallel_cross_entropy

# Replicated: norms of residuals and latents, routers, down projections of MLA, experts; everything else is sharded.
REPLICATED = re.compile(
    r"norm.weight|layers.\d.(norm|attention_norm|mlp_norm|mlp.router).weight"
    r"|layers.\d.attention.(q_norm|kv_norm|q_down|kv_down).weight|layers.\d.mlp.(gate|up|down).weight \[8,.*"
)


def local_weights(_rank: int, config: RunConfig) -> dict[str, tuple[ParameterShard, Tensor]]:
    _, (model_part,), _ = build_job(config)
    sharded_parameters(model_part).gather_all()
    return {name: (shard_of(parameter), parameter.detach()) for name, parameter in model_part.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "deepseek", "nemotron_h"])
def test_each_tp_rank_holds_its_shard(name: str) -> None:
    _, (network,), _ = build_job(layout_config(SMALL_MODELS[name]))
    ranks = on_ranks(2, local_weights, layout_config(SMALL_MODELS[name], tp=2))
    assert all(weights.keys() == dict(network.named_parameters()).keys() for weights in ranks)
    for path, whole in network.named_parameters():
        full_name = path + f" {[*whole.shape]}" * (whole.ndim > 2)
        parts = 1 if REPLICATED.fullmatch(full_name) else 2
        assert len({weights[path][0].offset for weights in ranks}) == parts, path
        for shard, held in (weights[path] for weights in ranks):
            assert shard.shape == whole.shape
            assert held.numel() * parts == whole.numel(), path
            assert torch.equal(held, box_of(whole, shard, held.shape)), path


def split_loss(rank: int, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> list[Tensor]:
    mesh = init_mesh(layout_config(SMALL_MODELS["llama"], tp=2)).submesh("tp")
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
