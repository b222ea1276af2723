"""Experts over several ranks: dispatch, gradients, the balance loss and whole training runs, against one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, trained
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmb.config.spec import Experts, Parallel
from llmb.models.moe import ExpertMlp, balance_losses
from llmb.train.initial_weights import slice_like
from llmb.train.optimizer import Optimizer, local
from llmb.train.parallel.expert_parallel import on_host, split_experts
from llmb.train.parallel.mesh import divided
from llmb.train.parallelize import recompute
from llmb.train.precision import Fp8GroupedLinear, keep_forms

EXPERTS = Experts(count=8, top_k=2, ffn=32, renormalise=False)
TOKENS = 24  # of all ranks
HIDDEN = 16


def mixture(experts: Experts = EXPERTS) -> ExpertMlp:
    return ExpertMlp(replace(SMALL_MODELS["grok1"], hidden=HIDDEN, experts=experts))


def weights_for(routing: str) -> dict[str, torch.Tensor]:
    """Weights of a whole mixture whose router likes few experts, or all."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.empty_like(weight).normal_(0.0, 0.2, generator=generator)
        for name, weight in mixture().state_dict().items()
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


Gradients = dict[str, tuple[tuple[int, ...], torch.Tensor]]  # of each parameter: where in it a rank's slice begins


def on_rank(
    rank: int, degrees: dict[str, int], weights: dict[str, torch.Tensor], kind: str = "plain"
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """Output, gradient of the input, and gradients of this rank's weights, for this rank's tokens."""
    dist.init_process_group("gloo")
    mesh = divided(rank, torch.device("cpu"), Parallel(**degrees), experts=True)
    block = mixture()
    if kind == "fp8":
        in_fp8(block)
    split_experts(block, mesh)
    load(block, weights)
    x_NC, slope_NC = (x.chunk(mesh.world_size)[rank] for x in inputs())
    return computed(block, x_NC, slope_NC, kind)


def in_fp8(block: ExpertMlp) -> None:
    for layer in (block.gate, block.up, block.down):
        layer.__class__ = Fp8GroupedLinear


@torch.no_grad()
def load(block: ExpertMlp, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in block.named_parameters():
        if isinstance(parameter, DTensor):
            local(parameter).copy_(slice_like(weights[name], parameter))
        else:
            parameter.copy_(weights[name])


def computed(
    block: ExpertMlp, x_NC: torch.Tensor, slope_NC: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    x_NC = x_NC.clone().requires_grad_()
    if kind == "recomputed":
        stack = torch.nn.Module()
        stack.layers = torch.nn.ModuleList([block])
        recompute(stack, 1)
    y_NC = block(x_NC)
    y_NC.backward(slope_NC)
    return y_NC.detach(), x_NC.grad, {name: own_gradient(weight) for name, weight in block.named_parameters()}


def own_gradient(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim, parameter.grad
    assert parameter.grad.placements == parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(offset), parameter.grad.to_local()


def of_ranks(degrees: dict[str, int], weights: dict[str, torch.Tensor], kind: str = "plain") -> dict[str, torch.Tensor]:
    """Ranks were dealt tokens in order; a weight's gradient is the sum over those that hold it."""
    found = on_ranks(degrees["dp"], on_rank, degrees, weights, kind)
    outputs, input_gradients, of_weights = zip(*found, strict=True)
    whole = {"output": torch.cat(outputs), "input": torch.cat(input_gradients)}
    for name in weights:
        whole[name] = torch.zeros_like(weights[name])
        for offset, part in (one[name] for one in of_weights):
            place = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
            whole[name][place] += part
    return whole


def of_one_process(weights: dict[str, torch.Tensor], kind: str = "plain") -> dict[str, torch.Tensor]:
    block = mixture()
    if kind == "fp8":
        in_fp8(block)
    load(block, weights)
    y_NC, grad_NC, gradients = computed(block, *inputs(), kind)
    return {"output": y_NC, "input": grad_NC, **{name: gradient for name, (_, gradient) in gradients.items()}}


def differences(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """By the size of each tensor."""
    return {name: ((ours[name] - one).norm() / one.norm()).item() for name, one in expected.items()}


LAYOUTS = [
    {"dp": 2, "ep": 2},
    {"dp": 2, "etp": 2},
    {"dp": 4, "ep": 2, "etp": 2},
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2},
]


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("routing", ["all", "two experts", "none on the first"])
def test_dispatch_equals_one_process(degrees: dict[str, int], routing: str) -> None:
    weights = weights_for(routing)
    assert max(differences(of_ranks(degrees, weights), of_one_process(weights)).values()) < 1e-5


def test_the_routings_are_what_they_are_called() -> None:
    chosen = {}
    for routing in ("all", "two experts", "none on the first"):
        block = mixture()
        load(block, weights_for(routing))
        chosen[routing] = set(block.router(inputs()[0])[1].flatten().tolist())
    assert chosen["two experts"] == {1, 2}
    assert chosen["none on the first"] <= {4, 5, 6, 7}
    assert len(chosen["all"]) > 5


def test_dispatch_equals_one_process_when_computed_again() -> None:
    weights = weights_for("all")
    again = of_ranks({"dp": 4, "ep": 2, "etp": 2}, weights, "recomputed")
    assert max(differences(again, of_one_process(weights)).values()) < 1e-5


def after_an_update(rank: int, degrees: dict[str, int], weights: dict[str, torch.Tensor]) -> list[bool]:
    """Whether this rank's experts make the same of its rows with forms that are kept and without."""
    dist.init_process_group("gloo")
    mesh = divided(rank, torch.device("cpu"), Parallel(**degrees), experts=True)
    block = mixture()
    in_fp8(block)
    split_experts(block, mesh)
    load(block, weights)
    keep_forms(block)
    x_NC, slope_NC = (x.chunk(mesh.world_size)[rank] for x in inputs())
    before = computed(block, x_NC, slope_NC, "plain")[0]
    optimizer = Optimizer(block.named_parameters(), mesh, 0.1, set())
    optimizer.update(0.1)
    kept = block(x_NC).detach()
    for layer in (block.gate, block.up, block.down):
        layer.forms = None
    return [torch.equal(kept, block(x_NC).detach()), not torch.equal(kept, before)]


def test_forms_that_are_kept_of_split_experts_follow_updates() -> None:
    found = on_ranks(2, after_an_update, {"dp": 2, "ep": 2}, weights_for("all"))
    assert found == [[True, True]] * 2


@pytest.mark.parametrize("routing", ["all", "two experts", "none on the first"])
def test_dispatch_in_fp8_is_as_near_to_exact_as_that_of_one_process(routing: str) -> None:
    """Each rank has scales of its own, so numbers are rounded differently, but no more than by one process."""
    weights = weights_for(routing)
    exact = of_one_process(weights)
    alone = differences(of_one_process(weights, "fp8"), exact)
    spread = differences(of_ranks({"dp": 4, "ep": 2, "etp": 2}, weights, "fp8"), exact)
    assert min(spread.values()) > 0
    assert max(spread.values()) < 1.2 * max(alone.values()), (spread, alone)


def balance_on_rank(rank: int, degrees: dict[str, int], weights: dict[str, torch.Tensor]) -> Any:
    dist.init_process_group("gloo")
    mesh = divided(rank, torch.device("cpu"), Parallel(**degrees), experts=True)
    block = mixture(replace(EXPERTS, aux_loss=0.5))
    split_experts(block, mesh)
    load(block, weights)
    loss = balance_loss(block, inputs()[0].chunk(mesh.world_size)[rank])
    (loss / mesh.size("cp")).backward()
    return loss.item(), block.router.weight.grad


def balance_loss(block: ExpertMlp, x_NC: torch.Tensor) -> torch.Tensor:
    with balance_losses(block) as losses:
        block(x_NC)
    (loss,) = losses
    return loss


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "ep": 2}], ids=str)
def test_the_balance_loss_is_over_all_tokens_of_a_micro_batch(degrees: dict[str, int]) -> None:
    weights = weights_for("all")
    block = mixture(replace(EXPERTS, aux_loss=0.5))
    load(block, weights)
    expected = balance_loss(block, inputs()[0])
    expected.backward()
    losses, gradients = zip(*on_ranks(Parallel(**degrees).world_size, balance_on_rank, degrees, weights), strict=True)
    assert losses == pytest.approx([expected.item()] * len(losses), rel=1e-6)
    torch.testing.assert_close(sum(gradients), block.router.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sent", [24, 25, 1, 0])
def test_a_rehearsal_sends_every_row_and_as_many_to_each_rank(monkeypatch: pytest.MonkeyPatch, sent: int) -> None:
    monkeypatch.setattr("llmb.train.parallel.expert_parallel.is_dry_run", lambda: True)
    counts = on_host(torch.empty(3, 4, device="meta"), sent)
    assert len(counts) == 3
    for row in counts:
        assert sum(row) == sent
        assert max(row) - min(row) <= 1


@pytest.mark.parametrize(
    ("architecture", "degrees", "more", "tolerance"),
    [
        ("grok1", {"dp": 2, "ep": 2}, {}, 1e-5),
        ("grok1", {"dp": 2, "etp": 2}, {"fsdp": True, "recompute_layers": 2}, 1e-5),
        ("grok1", {"tp": 2, "cp": 2, "ep": 2, "etp": 2}, {"balanced_experts": True}, 1e-5),
        ("deepseek", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}, {}, 1e-5),
        ("deepseek", {"dp": 2, "ep": 2}, {"dtype": "bf16"}, 2e-2),
        ("grok1", {"dp": 2, "ep": 2}, {"dtype": "fp8", "balanced_experts": True}, 6e-2),
        ("grok1", {"dp": 2}, {"dtype": "fp8", "balanced_experts": True, "fsdp": True}, 6e-2),
        ("grok1", {"dp": 2}, {"dtype": "fp8", "balanced_experts": True}, 6e-2),
    ],
    ids=str,
)
def test_training_equals_one_process(
    tmp_path: Path, architecture: str, degrees: dict[str, int], more: dict[str, Any], tolerance: float
) -> None:
    """The small Grok-1 has a balance loss, the small DeepSeek a shared expert and groups of experts."""
    config = changed(CONFIG, model=SMALL_MODELS[architecture], steps=3, lr=3e-4, **more)
    ga = 2 // degrees.get("dp", 1)
    spread = changed(config, **degrees, mbs=2, gbs=4, ga=ga)
    alone = changed(config, fsdp=False, recompute_layers=0, mbs=2, gbs=4, ga=2)
    assert trained(spread, tmp_path / "spread").farthest(trained(alone, tmp_path / "alone")) < tolerance
