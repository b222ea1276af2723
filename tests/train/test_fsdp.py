"""FSDP and the distributed optimizer train as one process; every rank holds only its shards."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_ranks import Trained, on_ranks
from training_ranks import trained as trained_in

from llmb.config.spec import RunConfig
from llmb.models.architectures import build_model
from llmb.models.moe import Router
from llmb.train import activation_offload
from llmb.train.loop import TrainJob, accumulate_gradients
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.mesh import Mesh, init_mesh
from llmb.train.parallelize import build_model_parts
from llmb.train.train_checkpoint import Checkpointer, state_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest resets the engine's own filter

# Nothing divides by the number of ranks: some shards are padded or empty, and some weights stay replicated.
UNEVEN = replace(SMALL_MODELS["llama"], name="uneven", hidden=22, ffn=50, vocab=130, head_dim=10)
MODELS = SMALL_MODELS | {"uneven": UNEVEN}
CLOSE = {"fp32": 1e-5, "bf16": 5e-3, "fp8": 5e-2}  # one process casts or quantizes weights directly from fp32


def config_of_layout(name: str, **changes: Any) -> RunConfig:
    """Return a configuration of two steps of 12 sequences each."""
    base: dict[str, Any] = {"model": MODELS[name], "gbs": 12, "mbs": 1, "steps": 2, "lr": 1e-3}
    config = changed(CONFIG, **(base | changes))
    ga = 12 // (config.workload.mbs * config.parallel.dp)
    return changed(config, ga=ga, gpus=config.parallel.world_size)


@cache
def outcome(config_of: str, **changes: Any) -> Trained:
    """Run a configuration in a temporary folder; cached."""
    with TemporaryDirectory() as folder:
        return trained_in(config_of_layout(config_of, **changes), Path(folder))


def assert_like_one_process(name: str, dtype: str = "fp32", mbs: int = 2, **layout: Any) -> None:
    reference = outcome(name, dtype=dtype, mbs=mbs)
    assert outcome(name, dtype=dtype, mbs=mbs, **layout).max_distance(reference) < CLOSE[dtype]


DP_CASES = [  # model, dp, mbs, fsdp
    ("llama", 2, 2, True),
    ("llama", 2, 2, False),
    ("grok1", 2, 2, True),
    ("uneven", 3, 1, True),
    ("uneven", 3, 1, False),
]
MORE_DP_CASES = [
    ("grok1", 2, 2, False),
    *((name, 2, 2, fsdp) for name in ("deepseek", "nemotron_h") for fsdp in (True, False)),
    *((name, 4, 1, fsdp) for name in ("grok1", "nemotron_h") for fsdp in (True, False)),
    *((name, 4, 3, fsdp) for name in ("llama", "grok1", "uneven") for fsdp in (True, False)),
    *(("llama", 2, 6, fsdp) for fsdp in (True, False)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dp", "mbs", "fsdp"),
    [*DP_CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_DP_CASES)],
)
def test_dp_equals_one_process(name: str, dp: int, mbs: int, fsdp: bool) -> None:
    assert_like_one_process(name, dp=dp, fsdp=fsdp, mbs=mbs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fsdp", "dtype"),
    [
        ("grok1", True, "fp8"),
        ("nemotron_h", False, "bf16"),
        pytest.param("grok1", True, "bf16", marks=pytest.mark.nightly),
        pytest.param("nemotron_h", False, "fp8", marks=pytest.mark.nightly),
        pytest.param("llama", True, "bf16", marks=pytest.mark.nightly),
        pytest.param("llama", True, "fp8", marks=pytest.mark.nightly),
    ],
)
def test_weights_are_gathered_in_bf16(name: str, fsdp: bool, dtype: str) -> None:
    assert_like_one_process(name, dtype, dp=2, fsdp=fsdp)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["uneven", pytest.param("deepseek", marks=pytest.mark.nightly)])
def test_dp_with_tp_equals_one_process(name: str, fsdp: bool) -> None:
    assert_like_one_process(name, dp=3, tp=2, fsdp=fsdp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("grok1", {"dp": 4, "ep": 2, "fsdp": True, "mbs": 1}),
        pytest.param("grok1", {"dp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.nightly),
        pytest.param("deepseek", {"tp": 4, "ep": 2}, marks=pytest.mark.nightly),  # only the experts have replicas
        pytest.param(
            "deepseek", {"dp": 4, "ep": 2, "fsdp": True, "recompute_layers": 3, "mbs": 1}, marks=pytest.mark.nightly
        ),
    ],
)
def test_dp_with_ep_equals_one_process(name: str, layout: dict) -> None:
    assert_like_one_process(name, **layout)


@pytest.mark.slow
def test_fsdp_with_recomputation_and_offload(monkeypatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    assert_like_one_process("grok1", dp=2, fsdp=True, recompute_layers=2, offload_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_communication_overlap_is_bit_exact(fsdp: bool) -> None:
    overlapped = outcome("grok1", dtype="fp32", mbs=2, dp=2, fsdp=fsdp)
    reference = outcome("grok1", dtype="fp32", mbs=2, dp=2, fsdp=fsdp, overlap_gather=False, overlap_reduce=False)
    assert overlapped.losses == reference.losses
    assert all(torch.equal(overlapped.tensors[name], reference.tensors[name]) for name in overlapped.tensors)


@pytest.mark.slow
def test_fsdp_is_deterministic(tmp_path: Path) -> None:
    layout: dict[str, Any] = {"dtype": "fp32", "mbs": 2, "dp": 2, "fsdp": True}
    first, second = outcome("llama", **layout), trained_in(config_of_layout("llama", **layout), tmp_path)
    assert (first.losses, first.norms) == (second.losses, second.norms)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


# The following tests inspect single ranks.


def build(config: RunConfig) -> tuple[TrainJob, list, Optimizer]:
    job = TrainJob(config, config.workload, init_mesh(config))
    model_parts = build_model_parts(config, job.workload, job.mesh)
    return job, model_parts, Optimizer(model_parts[0].named_parameters(), job.mesh, 1e-3, set())


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def initial_weights(_rank: int, config: RunConfig) -> dict[str, Tensor]:
    (model_part,) = build_model_parts(config, config.workload, init_mesh(config))
    return {name: full(parameter.detach()) for name, parameter in model_part.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("nemotron_h", {"dp": 2, "tp": 2}),
        ("uneven", {"dp": 3, "tp": 2}),
        pytest.param("uneven", {"dp": 4}, marks=pytest.mark.nightly),
        pytest.param("grok1", {"dp": 2, "tp": 2}, marks=pytest.mark.nightly),
    ],
)
def test_every_layout_has_the_same_initial_weights(name: str, layout: dict) -> None:
    config = config_of_layout(name, **layout)
    reference = build_model(config.model)
    reference.init_weights(config.workload.seed)
    expected = dict(reference.named_parameters())
    for weights in on_ranks(config.parallel.world_size, initial_weights, config):
        assert weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def count_elements(_rank: int, config: RunConfig) -> tuple[int, int, int]:
    """Return the number of elements in this rank's shards, in its routers and in its gradients after a step."""
    job, (model_part,), optimizer = build(config)
    accumulate_gradients(job, [model_part], 1)
    routers = sum(p.numel() for m in model_part.modules() if isinstance(m, Router) for p in m.parameters())
    gradients = sum(p.grad.to_local().numel() for p in optimizer.parameters.values())
    return sum(p.numel() for p in optimizer.shards.values()), routers, gradients


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [True, False])
def test_each_rank_holds_its_shard(fsdp: bool) -> None:
    config = config_of_layout("grok1", dp=4, fsdp=fsdp)
    total = sum(p.numel() for p in build_model(config.model).parameters())
    for held, routers, gradients in on_ranks(4, count_elements, config):
        assert held == gradients == (total - routers) // 4 + routers


class CountedCollectives(TorchDispatchMode):
    """Counter of collectives by operation name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self.counts[operation._opname.strip("_")] += 1
        return operation(*args, **(kwargs or {}))


def collectives(_rank: int, config: RunConfig) -> Counter[str]:
    job, model_parts, optimizer = build(config)
    accumulate_gradients(job, model_parts, 1)
    optimizer.update(1e-3)
    with CountedCollectives() as counted:
        accumulate_gradients(job, model_parts, 2)
    return counted.counts


@pytest.mark.slow
def test_number_of_collectives_per_step() -> None:
    """Four layers and the root are five FSDP groups; there are three micro-batches."""
    for fsdp, gathers, reductions in ((False, 5, 5), (True, 3 * (5 + 4), 3 * 5)):
        for counted in on_ranks(4, collectives, config_of_layout("llama", dp=4, fsdp=fsdp)):
            assert counted == {"allgather_base": gathers, "reduce_scatter_base": reductions}


def staging_is_isolated(_rank: int, config: RunConfig, folder: Path) -> bool:
    """Return whether tensors staged for a checkpoint stay unchanged while training continues."""
    job, model_parts, optimizer = build(config)
    accumulate_gradients(job, model_parts, 1)
    optimizer.update(1e-3)
    stager = Checkpointer(folder, config, job.workload, job.mesh, model_parts, optimizer)._stager
    copies = stager.stage(state_tensors(model_parts, optimizer))
    before = {name: full(tensor).clone() for name, tensor in copies.items()}
    accumulate_gradients(job, model_parts, 2)
    optimizer.update(1e-3)
    now = {name: full(tensor) for name, tensor in state_tensors(model_parts, optimizer).items()}
    return all(torch.equal(before[n], full(copies[n])) and not torch.equal(before[n], now[n]) for n in now)


@pytest.mark.slow
def test_staged_checkpoint_is_not_modified_by_training(tmp_path: Path) -> None:
    assert on_ranks(2, staging_is_isolated, config_of_layout("llama", dp=2, fsdp=True), tmp_path) == [True, True]


def test_one_process_is_not_sharded() -> None:
    config = config_of_layout("llama", fsdp=True)
    (model_part,) = build_model_parts(config, config.workload, Mesh(0, 1, torch.device("cpu")))
    assert type(model_part) is type(build_model(config.model))
    assert not any(isinstance(parameter, DTensor) for parameter in model_part.parameters())
