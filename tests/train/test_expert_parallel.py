"""Expert parallelism: dispatch, gradients, auxiliary loss and repeated steps, compared with one process."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from config_changes import changed
from small_config import CONFIG
from small_models import SMALL_MODELS
from torch.utils._python_dispatch import TorchDispatchMode
from training_ranks import on_ranks, trained

from llmb.config.model import MoEConfig
from llmb.config.spec import Parallel
from llmb.models.moe import MoE, collect_aux_losses
from llmb.train.module_class import use_class
from llmb.train.parallel.expert_parallel import apply_expert_parallel, expert_dispatchers, pop_overflow
from llmb.train.parallel.mesh import Mesh, build_mesh
from llmb.train.parallel.parameter_shard import ParameterShard, box_of, shard_of
from llmb.train.parallelize import apply_recompute
from llmb.train.precision import Fp8GroupedLinear

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
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, and so the padding of all buffers
    assert torch.empty(1).isnan()
    block, mesh = block_on_rank(rank, degrees, fp8=kind == "fp8")
    load(block, weights)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    x_NC, d_y_NC = (x.chunk(mesh.world_size)[rank].to(dtype) for x in inputs())
    return forward_backward(block, x_NC, d_y_NC, kind)


def block_on_rank(
    rank: int, degrees: dict[str, int], experts: MoEConfig = EXPERTS, factor: float | None = None, fp8: bool = False
) -> tuple[MoE, Mesh]:
    """Return this rank's part of the block, without weights, by default with a capacity that fits every routing."""
    dist.init_process_group("gloo")
    mesh = build_mesh(rank, torch.device("cpu"), Parallel(**degrees), experts=True)
    block = moe_block(experts)
    for layer in (block.gate, block.up, block.down) if fp8 else ():
        use_class(layer, Fp8GroupedLinear)
    apply_expert_parallel(block, mesh, mesh.size("ep") if factor is None else factor)
    return block, mesh


def load(block: MoE, weights: dict[str, torch.Tensor]) -> None:
    """Give every parameter memory and this rank's box of its weight."""
    for path, parameter in [*block.named_parameters()]:
        owner, _, name = path.rpartition(".")
        box = torch.nn.Parameter(box_of(weights[path], shard_of(parameter), parameter.shape).clone())
        box.shard = shard_of(parameter)
        block.get_submodule(owner).register_parameter(name, box)


def forward_backward(
    block: MoE, x_NC: torch.Tensor, d_y_NC: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    x_NC = x_NC.clone().requires_grad_()
    if kind == "recomputed":
        stack = torch.nn.Module()
        stack.layers = torch.nn.ModuleList([block])
        apply_recompute(stack, 1)
    with no_host_reads() if kind == "bf16" else nullcontext():
        y_NC = block(x_NC)
        y_NC.backward(d_y_NC)
    return (
        y_NC.detach(),
        x_NC.grad,
        {name: (shard_of(weight).offset, weight.grad) for name, weight in block.named_parameters()},
    )


class NoHostReads(TorchDispatchMode):
    """Refuses operators that synchronize with a GPU; expert GEMMs in bf16 are one operator."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket not in SYNCHRONIZING, f"{function} reads values on the host"
        return function(*args, **(kwargs or {}))


aten = torch.ops.aten
SYNCHRONIZING = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.repeat_interleave, aten.unique_dim)


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Also refuse methods that read a CPU tensor without an operator."""

    def refuse(*_args: Any) -> None:
        raise AssertionError("a value is read on the host")

    with pytest.MonkeyPatch.context() as patch, NoHostReads():
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


def run_on_ranks(
    degrees: dict[str, int], weights: dict[str, torch.Tensor], kind: str = "plain"
) -> dict[str, torch.Tensor]:
    """Combine the results of all ranks: tokens are split in order, weight gradients summed over replicas."""
    results = on_ranks(Parallel(**degrees).world_size, on_rank, degrees, weights, kind)
    outputs, input_gradients, of_weights = zip(*results, strict=True)
    whole = {"output": torch.cat(outputs), "input": torch.cat(input_gradients)}
    for name in weights:
        whole[name] = torch.zeros_like(weights[name])
        for offset, shard in (gradients[name] for gradients in of_weights):
            box_of(whole[name], ParameterShard((), offset), shard.shape).add_(shard)
    return whole


@cache
def one_process(routing: str, kind: str = "plain") -> dict[str, torch.Tensor]:
    return run_on_ranks({}, weights_for(routing), kind)


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


SMALLEST_AND_RICHEST = (LAYOUTS[0], LAYOUTS[2])
CASES = [("all", "plain"), ("none on the first", "plain"), ("two experts", "plain"), ("all", "recomputed")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "routing", "kind"),
    [
        pytest.param(
            degrees, *case, marks=[] if case in CASES[:1] or degrees in SMALLEST_AND_RICHEST else [pytest.mark.nightly]
        )
        for degrees in LAYOUTS
        for case in CASES
    ],
    ids=str,
)
def test_dispatch_equals_one_process(degrees: dict[str, int], routing: str, kind: str) -> None:
    actual = run_on_ranks(degrees, weights_for(routing), kind)
    assert max(differences(actual, one_process(routing)).values()) < 1e-5


def test_routing_cases() -> None:
    experts_used = {}
    for routing in ("all", "two experts", "none on the first"):
        block = moe_block()
        load(block, weights_for(routing))
        experts_used[routing] = set(block.router(inputs()[0])[1].flatten().tolist())
    assert experts_used["two experts"] == {1, 2}
    assert experts_used["none on the first"] <= {4, 5, 6, 7}
    assert len(experts_used["all"]) > 5


@pytest.mark.parametrize("degrees", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "etp": 2}], ids=str)
def test_dispatch_reads_nothing_on_the_host(degrees: dict[str, int]) -> None:
    actual = run_on_ranks(degrees, weights_for("all"), "bf16")
    assert max(differences(actual, one_process("all")).values()) < 2e-2


def overflow_on_rank(rank: int, factor: float) -> tuple[float, bool]:
    """Return the number of pairs that exceeded their capacity, and whether all results are finite."""
    torch.use_deterministic_algorithms(True)
    block, mesh = block_on_rank(rank, {"dp": 2, "ep": 2}, factor=factor)
    load(block, weights_for("none on the first"))
    x_NC, d_y_NC = (x.chunk(2)[rank] for x in inputs())
    y_NC, dx_NC, gradients = forward_backward(block, x_NC, d_y_NC, "plain")
    tensors = [y_NC, dx_NC, *(gradient for _, gradient in gradients.values())]
    return pop_overflow(expert_dispatchers([block]), mesh.device).item(), all(x.isfinite().all() for x in tensors)


@pytest.mark.parametrize(("factor", "overflow"), [(0.5, 1), (1.25, 1), (2.0, 0)])
def test_overflow_is_counted_and_drops_tokens(factor: float, overflow: int) -> None:
    """Both ranks send all of their 24 rows to the second."""
    assert on_ranks(2, overflow_on_rank, factor) == [(overflow, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "routing", ["all", *(pytest.param(few, marks=pytest.mark.nightly) for few in ("two experts", "none on the first"))]
)
def test_fp8_dispatch_is_as_accurate_as_one_process(routing: str) -> None:
    """Each rank has its own scales, so rounding differs, but not by more than in one process."""
    exact = one_process(routing)
    alone = differences(one_process(routing, "fp8"), exact)
    spread = differences(run_on_ranks({"dp": 4, "ep": 2, "etp": 2}, weights_for(routing), "fp8"), exact)
    assert min(spread.values()) > 0
    assert max(spread.values()) < 1.2 * max(alone.values()), (spread, alone)


def balance_on_rank(rank: int, degrees: dict[str, int], weights: dict[str, torch.Tensor]) -> Any:
    """Return the auxiliary loss, and this rank's term of the router's gradient."""
    block, mesh = block_on_rank(rank, degrees, replace(EXPERTS, aux_loss=0.5))
    load(block, weights)
    with collect_aux_losses(block) as losses:
        block(inputs()[0].chunk(mesh.world_size)[rank])
    (loss,) = losses
    (loss / mesh.size("cp")).backward()
    return loss.item(), block.router.weight.grad


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "ep": 2}], ids=str)
def test_aux_loss_is_over_all_tokens_of_a_micro_batch(degrees: dict[str, int]) -> None:
    weights = weights_for("all")
    ((expected, gradient),) = on_ranks(1, balance_on_rank, {}, weights)
    losses, gradients = zip(*on_ranks(Parallel(**degrees).world_size, balance_on_rank, degrees, weights), strict=True)
    assert losses == pytest.approx([expected] * len(losses), rel=1e-6)
    torch.testing.assert_close(sum(gradients), gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [pytest.param({"dp": 2, "ep": 2}, marks=pytest.mark.nightly), {"pp": 2, "dp": 2, "ep": 2, "fsdp": True}],
    ids=str,
)
def test_overflow_repeats_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, degrees: dict[str, int]
) -> None:
    monkeypatch.setattr("llmb.train.parallelize.initial_capacity_factor", lambda _workload: 0.25)
    config = changed(CONFIG, model=SMALL_MODELS["deepseek"], steps=3, lr=3e-4, mbs=2, gbs=8)
    repeated = trained(changed(config, **degrees, ga=2), tmp_path / "repeated")
    lines = [line for line in capfd.readouterr().out.splitlines() if "repeated" in line]
    reason = "an expert-parallel pair received more rows than its capacity; capacity factor"
    factors = ["0.25 -> 0.5", "0.5 -> 1", "1 -> 2"]
    assert lines == [f"step 1 repeated: {reason} {change}" for change in factors]
    assert repeated.max_distance(trained(changed(config, ga=4), tmp_path / "alone")) < 1e-5
