"""FSDP and the distributed optimizer train as one process; every rank holds only its shards."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from sharded_network import own_weights
from small_config import CONFIG, changed
from small_models import SMALL_MODELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_ranks import Trained, on_ranks
from training_ranks import trained as trained_in

from llmb.config.spec import RunConfig
from llmb.models.architectures import build_model
from llmb.train import activation_offload
from llmb.train.chunked_tensor import chunk_values
from llmb.train.loop import TrainJob, accumulate_gradients
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.mesh import init_mesh
from llmb.train.parallel.parameter_shard import ParameterShard, box_of
from llmb.train.parallelize import build_model_parts, build_optimizer
from llmb.train.train_checkpoint import Checkpointer, state_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest resets the engine's own filter

# Nothing divides by the number of ranks: shards are padded, and begin inside a row.
UNEVEN = replace(SMALL_MODELS["llama"], name="uneven", hidden=22, ffn=50, vocab=130, head_dim=10)
MODELS = SMALL_MODELS | {"uneven": UNEVEN}
CLOSE = {"fp32": 1e-5, "bf16": 5e-3, "fp8": 5e-2}


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
    return job, model_parts, build_optimizer(model_parts, job.workload, job.mesh)


def initial_weights(_rank: int, config: RunConfig) -> list[tuple[str, tuple[int, ...], Tensor]]:
    _, (model_part,), _ = build(config)
    return [*own_weights(sharded_parameters(model_part))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("nemotron_h", {"dp": 2, "tp": 2}),
        ("uneven", {"dp": 3, "tp": 2}),
        pytest.param("uneven", {"dp": 4}, marks=pytest.mark.nightly),
        pytest.param("grok1", {"dp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.nightly),
    ],
)
def test_every_layout_has_the_same_initial_weights(name: str, layout: dict) -> None:
    """The boxes of all ranks are the weights of an unsharded model; only vectors and routers are replicated."""
    config = config_of_layout(name, **layout)
    reference = build_model(config.model)
    reference.init_weights(config.workload.seed)
    expected = dict(reference.named_parameters())
    held = {name: torch.zeros_like(weight, dtype=torch.int32) for name, weight in expected.items()}
    for weights in on_ranks(config.parallel.world_size, initial_weights, config):
        for name, offset, values in weights:
            box = box_of(expected[name], ParameterShard(expected[name].shape, offset), values.shape)
            assert torch.equal(values, box), name
            box_of(held[name], ParameterShard(expected[name].shape, offset), values.shape).add_(1)
    for name, times in held.items():
        is_matrix = expected[name].ndim > 1 and not re.search("router|conv", name)
        assert times.unique().tolist() == [1] if is_matrix else times.min() >= 1, name


def held_elements(_rank: int, config: RunConfig) -> tuple[int, int, int, int]:
    """Return the number of elements of replicated parameters, shards, their gradients and weights, after a step."""
    job, model_parts, optimizer = build(config)
    accumulate_gradients(job, model_parts, 1)
    return (
        sum(parameter.grad.numel() for parameter in optimizer.replicated.values()),
        sum(bucket.shard.numel() for bucket in optimizer.buckets),
        sum(bucket.grad_shard.numel() for bucket in optimizer.buckets),
        sum(bucket.flat.untyped_storage().nbytes() // 4 for bucket in optimizer.buckets),
    )


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [True, False])
def test_each_rank_holds_its_shard(fsdp: bool) -> None:
    config = config_of_layout("grok1", dp=4, fsdp=fsdp)
    parameters = dict(build_model(config.model).named_parameters())
    replicated = sum(p.numel() for name, p in parameters.items() if re.search("router|norm", name))
    matrices = sum(p.numel() for p in parameters.values()) - replicated
    expected = (replicated, matrices // 4, matrices // 4, 0 if fsdp else matrices)
    assert on_ranks(4, held_elements, config) == [expected] * 4


def memory_in_passes(_rank: int, config: RunConfig) -> list[tuple[int, ...]]:
    """Return the layers whose weights have memory when each layer's forward and backward pass begins."""
    job, (model_part,), optimizer = build(config)
    seen: list[tuple[int, ...]] = []

    def look(*_args: Any) -> None:
        with_memory = {
            int(bucket.names[0].split(".")[1])
            for bucket in optimizer.buckets
            if bucket.names[0].startswith("layers.") and bucket.flat.untyped_storage().nbytes()
        }
        seen.append(tuple(sorted(with_memory)))

    def look_in_backward(_layer: Any, _args: Any, out: Tensor) -> None:
        out.register_hook(look)

    for layer in model_part.layers:
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look_in_backward, prepend=True)  # inside the hook that gathers
    accumulate_gradients(job, [model_part], 1)
    look()
    return seen


@pytest.mark.slow
def test_gathered_weights_are_freed() -> None:
    """A layer has memory in its own passes and while the layer before it computes."""
    for overlap in (False, True):
        config = config_of_layout("llama", dp=2, mbs=6, fsdp=True, overlap_gather=overlap)
        forward, backward = [(0,), (1,), (2,), (3,)], [(3,), (2,), (1,), (0,)]
        if overlap:
            forward, backward = [(0, 1), (1, 2), (2, 3), (3,)], [(2, 3), (1, 2), (0, 1), (0,)]
        assert on_ranks(2, memory_in_passes, config) == [[*forward, *backward, ()]] * 2


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
    """Four layers and the rest are five units; there are three micro-batches.

    With fsdp the rest is gathered once, and each layer in every pass; the last layer stays for its backward pass.
    """
    for fsdp, gathers, reductions in ((False, 5, 5), (True, 1 + 3 * (4 + 3), 3 * 5)):
        expected = {"allgather_base": gathers, "reduce_scatter_base": reductions, "allreduce": 1}
        assert on_ranks(4, collectives, config_of_layout("llama", dp=4, fsdp=fsdp)) == [expected] * 4


def staging_is_isolated(_rank: int, config: RunConfig, folder: Path) -> bool:
    """Return whether tensors staged for a checkpoint stay unchanged while training continues."""
    job, model_parts, optimizer = build(config)
    accumulate_gradients(job, model_parts, 1)
    optimizer.update(1e-3)
    staged = Checkpointer(folder, config, job.workload, job.mesh, model_parts, optimizer)._stage()

    def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = {name: [part.flatten() for part in chunk_values(tensor)] for name, tensor in tensors.items()}
        return {name: torch.cat(part).clone() for name, part in parts.items() if part}

    before = values(staged)
    accumulate_gradients(job, model_parts, 2)
    optimizer.update(1e-3)
    after, now = values(staged), values(state_tensors(model_parts, optimizer))
    return all(torch.equal(before[n], after[n]) and not torch.equal(before[n], now[n]) for n in now)


@pytest.mark.slow
def test_staged_checkpoint_is_not_modified_by_training(tmp_path: Path) -> None:
    assert on_ranks(2, staging_is_isolated, config_of_layout("llama", dp=2, fsdp=True), tmp_path) == [True, True]


def test_one_process_gathers_nothing() -> None:
    config = config_of_layout("llama", fsdp=True)
    job, (model_part,), optimizer = build(config)
    with CountedCollectives() as counted:
        accumulate_gradients(job, [model_part], 1)
        optimizer.update(1e-3)
    assert not counted.counts
    assert not any(layer._forward_pre_hooks for layer in model_part.layers)
