"""Expert parallelism: dispatch, gradients, auxiliary loss and training runs, compared with one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from training_ranks import on_ranks, trained

from llmb.config.spec import MoEConfig, Parallel
from llmb.models.moe import MoE, collect_aux_losses
from llmb.train.initial_weights import local_slice
from llmb.train.optimizer import Optimizer, local
from llmb.train.parallel.expert_parallel import apply_expert_parallel, split_sizes_to_host
from llmb.train.parallel.mesh import build_mesh
from llmb.train.parallelize import apply_recompute
from llmb.train.precision import Fp8GroupedLinear, cache_fp8_weights

EXPERTS = MoEConfig(count=8, top_k=2, ffn=32, renormalise=False)
TOKENS = 24  # of all ranks
HIDDEN = 16


def moe_block(experts: MoEConfig = EXPERTS) -> MoE:
    return MoE(replace(SMALL_MODELS["grok1"], hidden=HIDDEN, experts=experts))


def weights_for(routing: str) -> dict[str, torch.Tensor]:
    """Return MoE weights whose router selects few experts, or all."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.empty_like(weight).normal_(0.0, 0.2, generator=generator)
        for name, weight in moe_block().state_dict().items()
    }
    if routing == "two experts":  # inputs are near 1, so these scores are far above the others
        weights["router.weight"][[1, 2]] += 10.0
    if routing == "none on the first":
        weights["router.weight"][:4] -= 10.0
    return weights


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x_NC = 1.0 + 0.5 * torch.randn(TOKENS, HIDDEN, generator=generator)
    return x_NC, torch.randn(x_NC.shape, generator=generator)


Gradients = dict[str, tuple[tuple[int, ...], torch.Tensor]]  # by parameter: offset of a shard, and its gradient


def on_rank(
    rank: int, degrees: dict[str, int], weights: dict[str, torch.Tensor], kind: str = "plain"
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """Return the output, the input gradient and the weight gradients of this rank, for its tokens."""
    dist.init_process_group("gloo")
    mesh = build_mesh(rank, torch.device("cpu"), Parallel(**degrees), experts=True)
    block = moe_block()
    if kind == "fp8":
        in_fp8(block)
    apply_expert_parallel(block, mesh)
    load(block, weights)
    x_NC, d_y_NC = (x.chunk(mesh.world_size)[rank] for x in inputs())
    return forward_backward(block, x_NC, d_y_NC, kind)


def in_fp8(block: MoE) -> None:
    for layer in (block.gate, block.up, block.down):
        layer.__class__ = Fp8GroupedLinear


@torch.no_grad()
def load(block: MoE, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in block.named_parameters():
        if isinstance(parameter, DTensor):
            local(parameter).copy_(local_slice(weights[name], parameter))
        else:
            parameter.copy_(weights[name])


def forward_backward(
    block: MoE, x_NC: torch.Tensor, d_y_NC: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    x_NC = x_NC.clone().requires_grad_()
    if kind == "recomputed":
        stack = torch.nn.Module()
        stack.layers = torch.nn.ModuleList([block])
        apply_recompute(stack, 1)
    y_NC = block(x_NC)
    y_NC.backward(d_y_NC)
    return y_NC.detach(), x_NC.grad, {name: local_gradient(weight) for name, weight in block.named_parameters()}


def local_gradient(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim, parameter.grad
    assert parameter.grad.placements == parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(offset), parameter.grad.to_local()


def run_on_ranks(
    degrees: dict[str, int], weights: dict[str, torch.Tensor], kind: str = "plain"
) -> dict[str, torch.Tensor]:
    """Combine the results of all ranks: tokens are split in order, weight gradients summed over replicas."""
    results = on_ranks(degrees["dp"], on_rank, degrees, weights, kind)
    outputs, input_gradients, of_weights = zip(*results, strict=True)
    whole = {"output": torch.cat(outputs), "input": torch.cat(input_gradients)}
    for name in weights:
        whole[name] = torch.zeros_like(weights[name])
        for offset, shard in (gradients[name] for gradients in of_weights):
            place = tuple(slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True))
            whole[name][place] += shard
    return whole


def run_one_process(weights: dict[str, torch.Tensor], kind: str = "plain") -> dict[str, torch.Tensor]:
    block = moe_block()
    if kind == "fp8":
        in_fp8(block)
    load(block, weights)
    y_NC, grad_NC, gradients = forward_backward(block, *inputs(), kind)
    return {"output": y_NC, "input": grad_NC, **{name: gradient for name, (_, gradient) in gradients.items()}}


def differences(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative error of each tensor."""
    return {name: ((actual[name] - tensor).norm() / tensor.norm()).item() for name, tensor in expected.items()}


LAYOUTS = [
    {"dp": 2, "ep": 2},
    {"dp": 2, "etp": 2},
    {"dp": 4, "ep": 2, "etp": 2},
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("routing", ["all", "two experts", "none on the first"])
def test_dispatch_equals_one_process(degrees: dict[str, int], routing: str) -> None:
    weights = weights_for(routing)
    assert max(differences(run_on_ranks(degrees, weights), run_one_process(weights)).values()) < 1e-5


def test_routing_cases() -> None:
    experts_used = {}
    for routing in ("all", "two experts", "none on the first"):
        block = moe_block()
        load(block, weights_for(routing))
        experts_used[routing] = set(block.router(inputs()[0])[1].flatten().tolist())
    assert experts_used["two experts"] == {1, 2}
    assert experts_used["none on the first"] <= {4, 5, 6, 7}
    assert len(experts_used["all"]) > 5


@pytest.mark.slow
def test_recomputed_dispatch_equals_one_process() -> None:
    weights = weights_for("all")
    recomputed = run_on_ranks({"dp": 4, "ep": 2, "etp": 2}, weights, "recomputed")
    assert max(differences(recomputed, run_one_process(weights)).values()) < 1e-5


def after_an_update(rank: int, degrees: dict[str, int], weights: dict[str, torch.Tensor]) -> list[bool]:
    """Return whether cached and uncached fp8 weights give the same outputs, and whether the update changed them."""
    dist.init_process_group("gloo")
    mesh = build_mesh(rank, torch.device("cpu"), Parallel(**degrees), experts=True)
    block = moe_block()
    in_fp8(block)
    apply_expert_parallel(block, mesh)
    load(block, weights)
    cache_fp8_weights(block)
    x_NC, d_y_NC = (x.chunk(mesh.world_size)[rank] for x in inputs())
    before = forward_backward(block, x_NC, d_y_NC, "plain")[0]
    optimizer = Optimizer(block.named_parameters(), mesh, 0.1, set())
    optimizer.update(0.1)
    cached = block(x_NC).detach()
    for layer in (block.gate, block.up, block.down):
        layer.fp8_cache = None
    return [torch.equal(cached, block(x_NC).detach()), not torch.equal(cached, before)]


def test_fp8_cache_of_sharded_experts_follows_updates() -> None:
    results = on_ranks(2, after_an_update, {"dp": 2, "ep": 2}, weights_for("all"))
    assert results == [[True, True]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["all", "two experts", "none on the first"])
def test_fp8_dispatch_is_as_accurate_as_one_process(routing: str) -> None:
    """Each rank has its own scales, so rounding differs, but not by more than in one process."""
    weights = weights_for(routing)
    exact = run_one_process(weights)
    alone = differences(run_one_process(weights, "fp8"), exact)
    spread = differences(run_on_ranks({"dp": 4, "ep": 2, "etp": 2}, weights, "fp8"), exact)
    assert min(spread.values()) > 0
    assert max(spread.values()) < 1.2 * max(alone.values()), (spread, alone)


def balance_on_rank(rank: int, degrees: dict[str, int], weights: dict[str, torch.Tensor]) -> Any:
    dist.init_process_group("gloo")
    mesh = build_mesh(rank, torch.device("cpu"), Parallel(**degrees), experts=True)
    block = moe_block(replace(EXPERTS, aux_loss=0.5))
    apply_expert_parallel(block, mesh)
    load(block, weights)
    loss = balance_loss(block, inputs()[0].chunk(mesh.world_size)[rank])
    (loss / mesh.size("cp")).backward()
    return loss.item(), block.router.weight.grad


def balance_loss(block: MoE, x_NC: torch.Tensor) -> torch.Tensor:
    with collect_aux_losses(block) as losses:
        block(x_NC)
    (loss,) = losses
    return loss


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "ep": 2}], ids=str)
def test_aux_loss_is_over_all_tokens_of_a_micro_batch(degrees: dict[str, int]) -> None:
    weights = weights_for("all")
    block = moe_block(replace(EXPERTS, aux_loss=0.5))
    load(block, weights)
    expected = balance_loss(block, inputs()[0])
    expected.backward()
    losses, gradients = zip(*on_ranks(Parallel(**degrees).world_size, balance_on_rank, degrees, weights), strict=True)
    assert losses == pytest.approx([expected.item()] * len(losses), rel=1e-6)
    torch.testing.assert_close(sum(gradients), block.router.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sent", [24, 25, 1, 0])
def test_dry_run_split_sizes_are_balanced(monkeypatch: pytest.MonkeyPatch, sent: int) -> None:
    monkeypatch.setattr("llmb.train.parallel.expert_parallel.is_dry_run", lambda: True)
    counts = split_sizes_to_host(torch.empty(3, 4, device="meta"), sent)
    assert len(counts) == 3
    for row in counts:
        assert sum(row) == sent
        assert max(row) - min(row) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "degrees", "more", "tolerance"),
    [
        pytest.param("grok1", {"dp": 2, "ep": 2}, {}, 1e-5, marks=pytest.mark.nightly),
        pytest.param(
            "grok1", {"dp": 2, "etp": 2}, {"fsdp": True, "recompute_layers": 2}, 1e-5, marks=pytest.mark.nightly
        ),
        pytest.param(
            "grok1", {"tp": 2, "cp": 2, "ep": 2, "etp": 2}, {"balanced_experts": True}, 1e-5, marks=pytest.mark.nightly
        ),
        pytest.param("deepseek", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}, {}, 1e-5, marks=pytest.mark.nightly),
        pytest.param("deepseek", {"dp": 2, "ep": 2}, {"dtype": "bf16"}, 2e-2, marks=pytest.mark.nightly),
        ("grok1", {"dp": 2, "ep": 2}, {"dtype": "fp8", "balanced_experts": True}, 6e-2),
        ("grok1", {"dp": 2}, {"dtype": "fp8", "balanced_experts": True, "fsdp": True}, 6e-2),
        pytest.param("grok1", {"dp": 2}, {"dtype": "fp8", "balanced_experts": True}, 6e-2, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_training_equals_one_process(
    tmp_path: Path, architecture: str, degrees: dict[str, int], more: dict[str, Any], tolerance: float
) -> None:
    """The small Grok-1 has an auxiliary loss, the small DeepSeek a shared expert and expert groups.

    `test_parallel_layouts.py` has those of `make test` in fp32.
    """
    config = changed(CONFIG, model=SMALL_MODELS[architecture], steps=3, lr=3e-4, **more)
    ga = 2 // degrees.get("dp", 1)
    spread = changed(config, **degrees, mbs=2, gbs=4, ga=ga)
    alone = changed(config, fsdp=False, recompute_layers=0, mbs=2, gbs=4, ga=2)
    assert trained(spread, tmp_path / "spread").max_distance(trained(alone, tmp_path / "alone")) < tolerance
