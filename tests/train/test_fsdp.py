"""Sharded over replicas in either kind, a model trains as in one process; every rank holds its share and no more."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from ranks import Trained, on_ranks
from ranks import trained as trained_in
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmb.config.spec import RunConfig
from llmb.models.architectures import build_model
from llmb.models.moe import Router
from llmb.train import activation_offload
from llmb.train.loop import Job, accumulate_gradients
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import Mesh, open_mesh
from llmb.train.parallelize import ready_parts
from llmb.train.train_checkpoint import Checkpoints, state_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest resets the engine's own filter

# Where nothing divides by the number of ranks: some slices are padded, some empty, and some weights stay whole.
UNEVEN = replace(SMALL_MODELS["llama"], name="uneven", hidden=22, ffn=50, vocab=130, head_dim=10)
MODELS = SMALL_MODELS | {"uneven": UNEVEN}
CLOSE = {"fp32": 1e-5, "bf16": 5e-3, "fp8": 5e-2}  # in one process weights are cast, or quantized, from fp32 at once


def spread(name: str, **changes: Any) -> RunConfig:
    """Two steps of 12 sequences each, by as many ranks as the layout needs."""
    base: dict[str, Any] = {"model": MODELS[name], "gbs": 12, "mbs": 1, "steps": 2, "lr": 1e-3}
    config = changed(CONFIG, **(base | changes))
    ga = 12 // (config.workload.mbs * config.parallel.dp)
    return changed(config, ga=ga, gpus=config.parallel.world_size)


@cache
def outcome(config_of: str, **changes: Any) -> Trained:
    """Of a run in a folder of its own; the same run is not done twice."""
    with TemporaryDirectory() as folder:
        return trained_in(spread(config_of, **changes), Path(folder))


def assert_like_one_process(name: str, dtype: str = "fp32", mbs: int = 2, **layout: Any) -> None:
    alone = outcome(name, dtype=dtype, mbs=mbs)
    assert outcome(name, dtype=dtype, mbs=mbs, **layout).farthest(alone) < CLOSE[dtype]


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize(
    ("name", "dp", "mbs"),
    [
        ("llama", 2, 2),
        ("llama", 4, 3),
        ("grok1", 2, 2),
        ("nemotron_h", 2, 2),
        ("uneven", 3, 1),
        pytest.param("deepseek", 2, 2, marks=pytest.mark.matrix),
        pytest.param("llama", 2, 6, marks=pytest.mark.matrix),
        pytest.param("grok1", 4, 1, marks=pytest.mark.matrix),
        pytest.param("grok1", 4, 3, marks=pytest.mark.matrix),
        pytest.param("nemotron_h", 4, 1, marks=pytest.mark.matrix),
        pytest.param("uneven", 4, 3, marks=pytest.mark.matrix),
    ],
)
def test_replicas(name: str, dp: int, mbs: int, fsdp: bool) -> None:
    assert_like_one_process(name, dp=dp, fsdp=fsdp, mbs=mbs)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("name", "fsdp"), [("grok1", True), ("nemotron_h", False), pytest.param("llama", True, marks=pytest.mark.matrix)]
)
def test_rounded_weights_travel(name: str, fsdp: bool, dtype: str) -> None:
    assert_like_one_process(name, dtype, dp=2, fsdp=fsdp)


@pytest.mark.parametrize("fsdp", [True, pytest.param(False, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", ["uneven", pytest.param("deepseek", marks=pytest.mark.matrix)])
def test_replicas_of_split_tensors(name: str, fsdp: bool) -> None:
    assert_like_one_process(name, dp=3, tp=2, fsdp=fsdp)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("grok1", {"dp": 4, "ep": 2, "fsdp": True, "mbs": 1}),
        pytest.param("grok1", {"dp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.matrix),
        pytest.param("deepseek", {"tp": 4, "ep": 2}, marks=pytest.mark.matrix),  # only the experts have replicas
        pytest.param(
            "deepseek", {"dp": 4, "ep": 2, "fsdp": True, "recompute_layers": 3, "mbs": 1}, marks=pytest.mark.matrix
        ),
    ],
)
def test_replicas_of_experts(name: str, layout: dict) -> None:
    assert_like_one_process(name, **layout)


def test_recomputed_and_offloaded_layers(monkeypatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 1)
    assert_like_one_process("grok1", dp=2, fsdp=True, recompute_layers=2, offload_layers=1)


@pytest.mark.parametrize("fsdp", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_what_overlaps_changes_no_bit(fsdp: bool) -> None:
    usual = outcome("grok1", dtype="fp32", mbs=2, dp=2, fsdp=fsdp)
    alone = outcome("grok1", dtype="fp32", mbs=2, dp=2, fsdp=fsdp, overlap_gather=False, overlap_reduce=False)
    assert usual.losses == alone.losses
    assert all(torch.equal(usual.tensors[name], alone.tensors[name]) for name in usual.tensors)


def test_every_run_of_a_layout_gives_the_same_bits(tmp_path: Path) -> None:
    layout: dict[str, Any] = {"dtype": "fp32", "mbs": 3, "dp": 4, "fsdp": True}
    first, second = outcome("llama", **layout), trained_in(spread("llama", **layout), tmp_path)
    assert (first.losses, first.norms) == (second.losses, second.norms)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


# What follows looks inside single ranks.


def ready(config: RunConfig) -> tuple[Job, list, Optimizer]:
    job = Job(config, config.workload, open_mesh(config))
    parts = ready_parts(config, job.work, job.mesh)
    return job, parts, Optimizer(parts[0].named_parameters(), job.mesh, 1e-3, set())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def initial_weights(_rank: int, config: RunConfig) -> dict[str, Tensor]:
    (part,) = ready_parts(config, config.workload, open_mesh(config))
    return {name: whole(parameter.detach()) for name, parameter in part.named_parameters()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("uneven", {"dp": 4}),
        ("nemotron_h", {"dp": 2, "tp": 2}),
        ("uneven", {"dp": 3, "tp": 2}),
        ("grok1", {"dp": 2, "tp": 2}),
    ],
)
def test_every_layout_starts_from_the_same_weights(name: str, layout: dict) -> None:
    config = spread(name, **layout)
    alone = build_model(config.model)
    alone.init_weights(config.workload.seed)
    expected = dict(alone.named_parameters())
    for weights in on_ranks(config.parallel.world_size, initial_weights, config):
        assert weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def share(_rank: int, config: RunConfig) -> tuple[int, int, int]:
    """Elements of this rank's slices, of the routers' among them, and of all slots for gradients after a step."""
    job, (part,), optimizer = ready(config)
    accumulate_gradients(job, [part], 1)
    routers = sum(p.numel() for m in part.modules() if isinstance(m, Router) for p in m.parameters())
    gradients = sum(p.grad.to_local().numel() for p in optimizer.parameters.values())
    return sum(p.numel() for p in optimizer.slices.values()), routers, gradients


@pytest.mark.parametrize("fsdp", [True, False])
def test_each_rank_holds_its_share(fsdp: bool) -> None:
    config = spread("grok1", dp=4, fsdp=fsdp)
    total = sum(p.numel() for p in build_model(config.model).parameters())
    for own, routers, gradients in on_ranks(4, share, config):
        assert own == gradients == (total - routers) // 4 + routers


class Counted(TorchDispatchMode):
    """How often ranks exchange what, by the names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self.found[operation._opname.strip("_")] += 1
        return operation(*args, **(kwargs or {}))


def collectives(_rank: int, config: RunConfig) -> Counter[str]:
    job, parts, optimizer = ready(config)
    accumulate_gradients(job, parts, 1)
    optimizer.update(1e-3)
    with Counted() as counted:
        accumulate_gradients(job, parts, 2)
    return counted.found


def test_when_ranks_exchange_what() -> None:
    """Four layers and the root make five groups; three micro-batches."""
    for fsdp, gathers, reductions in ((False, 5, 5), (True, 3 * (5 + 4), 3 * 5)):
        for counted in on_ranks(4, collectives, spread("llama", dp=4, fsdp=fsdp)):
            assert counted == {"allgather_base": gathers, "reduce_scatter_base": reductions}


def staged(_rank: int, config: RunConfig, folder: Path) -> bool:
    """Whether what was staged for a checkpoint stays as it was while training goes on."""
    job, parts, optimizer = ready(config)
    accumulate_gradients(job, parts, 1)
    optimizer.update(1e-3)
    stager = Checkpoints(folder, config, job.work, job.mesh, parts, optimizer)._stager
    copies = stager.stage(state_tensors(parts, optimizer))
    before = {name: whole(tensor).clone() for name, tensor in copies.items()}
    accumulate_gradients(job, parts, 2)
    optimizer.update(1e-3)
    now = {name: whole(tensor) for name, tensor in state_tensors(parts, optimizer).items()}
    return all(torch.equal(before[n], whole(copies[n])) and not torch.equal(before[n], now[n]) for n in now)


def test_a_staged_checkpoint_stays_as_it_was(tmp_path: Path) -> None:
    assert on_ranks(2, staged, spread("llama", dp=2, fsdp=True), tmp_path) == [True, True]


def test_one_process_is_not_sharded() -> None:
    config = spread("llama", fsdp=True)
    (part,) = ready_parts(config, config.workload, Mesh(0, 1, torch.device("cpu")))
    assert type(part) is type(build_model(config.model))
    assert not any(isinstance(parameter, DTensor) for parameter in part.parameters())
