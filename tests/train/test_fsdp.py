"""FSDP and the distributed optimizer: every rank holds only its shards, and gathers what it needs when it needs it."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from sharded_network import own_weights
from small_models import SMALL_MODELS, UNEVEN
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_ranks import build_job, layout_config, on_ranks

from llmb.config.spec import RunConfig
from llmb.models.architectures import build_model
from llmb.train.loop import accumulate_gradients
from llmb.train.parallel.fsdp import sharded_parameters
from llmb.train.parallel.parameter_shard import ParameterShard, box_of

MODELS = SMALL_MODELS | {"uneven": UNEVEN}


def config_of_layout(name: str, **changes: Any) -> RunConfig:
    """Return a configuration of two steps of 12 sequences each."""
    return layout_config(MODELS[name], **({"gbs": 12, "mbs": 1, "steps": 2, "lr": 1e-3} | changes))


def initial_weights(_rank: int, config: RunConfig) -> list[tuple[str, tuple[int, ...], Tensor]]:
    _, (model_part,), _ = build_job(config)
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
    job, model_parts, optimizer = build_job(config)
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
    job, (model_part,), optimizer = build_job(config)
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
    job, model_parts, optimizer = build_job(config)
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


def test_one_process_gathers_nothing() -> None:
    config = config_of_layout("llama", fsdp=True)
    job, (model_part,), optimizer = build_job(config)
    with CountedCollectives() as counted:
        accumulate_gradients(job, [model_part], 1)
        optimizer.update(1e-3)
    assert not counted.counts
    assert not any(layer._forward_pre_hooks for layer in model_part.layers)
