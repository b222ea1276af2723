"""A small model trained out of core and, as a reference, with autograd and torch.optim.AdamW."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from small_models import llama_model

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.offload_plan import Plan
from llmb.models.architectures import Network, build_model
from llmb.offload.bucket_params import param_slices
from llmb.offload.buffer_views import bucket_tensors
from llmb.offload.chunked_batches import ChunkedBatches
from llmb.offload.cuda_streams import Streams
from llmb.offload.offload_checkpoint import SCALES
from llmb.offload.trainer import Trainer, TrainerSettings
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU
from llmb.perfmodel.offload.simulator import simulate
from llmb.runtime.adamw_settings import BETAS, WEIGHT_DECAY
from llmb.runtime.checkpoint_folder import IDENTITY
from llmb.runtime.synthetic_tokens import synthetic_tokens
from llmb.runtime.token_data import TokenFile

CPU = torch.device("cpu")
SEED = 11
SMOOTH = 1e-3  # epsilon of Adam
# Relative to the reference, of losses, of gradient norms and of weights, whose last figure is absolute.
TOLERANCE = {"cpu": (2e-6, 1e-5, 1e-5, 2e-6), "cuda": (1e-5, 1e-4, 1e-4, 1e-5)}
UNTIED = llama_model(name="small", layers=3, vocab=300)
TIED = replace(UNTIED, name="tied", tied_embeddings=True)
# Everything is offloaded: with one buffer less a step could not be computed.
LEAST = Plan(
    dtype="fp32", seqlen=10, gbs=2, chunk_tokens=10, seqs_per_group=1, groups_per_round=1, loss_tokens=4,
    update="master", update_at="backward", resident_params=0, resident_grads=0, resident_states=0, param_blocks=2,
    grad_blocks=2, state_blocks=1, inp_slots=2, kv_slots=1, attn_slots=1, rest_slots=1, levels="FFF",
)  # fmt: skip


def has_plain_layers(model: Model) -> bool:
    """Return whether layers are those of a Llama, without anything that others have more."""
    others = model.qkv_bias, model.qk_norm, model.post_norms, model.attn_logit_softcap, model.local_rope
    return has_llama_layers(model) and model.activation == "silu" and not any(others)


def least_plan(model: Model) -> Plan:
    """Return two groups of three chunks a round, the last chunk and the last round short, in the fewest buffers.

    Chunks are saved at all levels that the model's layers have.
    """
    shards = ParamBuckets(model).vocab_shards
    letters = "FAIIFA" if has_llama_layers(model) else "AIIAA"
    return replace(
        LEAST, gbs=3, chunk_tokens=4, groups_per_round=2, param_blocks=shards, grad_blocks=shards,
        levels=(letters * model.layers * 2)[: model.layers * 6],
    )  # fmt: skip


def older_version(checkpoint: Path) -> None:
    """Leave of a checkpoint what a version without scales and checksums wrote."""
    (checkpoint / SCALES).unlink()
    content = json.loads((checkpoint / IDENTITY).read_text())
    (checkpoint / IDENTITY).write_text(json.dumps({k: v for k, v in content.items() if k not in ("files", "crc32")}))


def lr(step: int) -> float:
    """Return a different learning rate for each step, so that an update with the wrong one is detected."""
    return 1e-3 * (1 + step % 3)


def network_of(model: Model) -> Network:
    """Return a network with weights large enough that attention matters, and norm weights other than 1."""
    network = build_model(model)
    network.init_weights(SEED)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter *= 8
    return network


def train_reference(
    model: Model, plan: Plan, steps: int, clip: float | None, eps: float = SMOOTH
) -> tuple[list[float], list[float], Network]:
    """Return losses and gradient norms of each step, and the trained network; the plan only sets the batch."""
    return _train_on_whole_sequences(model, (plan.gbs, plan.seqlen + 1), steps, clip, eps)


@cache
def _train_on_whole_sequences(
    model: Model, shape: tuple[int, int], steps: int, clip: float | None, eps: float
) -> tuple[list[float], list[float], Network]:
    def backward(network: Network, step: int) -> float:
        tokens = synthetic_tokens(SEED, (step - 1) * shape[0], shape, model.vocab, CPU)
        loss = network(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return loss.item()

    return train_by_autograd(model, backward, steps, clip, eps)


def train_by_autograd(
    model: Model,
    backward: Callable[[Network, int], float],
    steps: int,
    clip: float | None = None,
    eps: float = SMOOTH,
) -> tuple[list[float], list[float], Network]:
    """Train with the gradients and losses of `backward`, given the network and the step."""
    network = network_of(model)
    matrices, norms = ([p for p in network.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=eps)
    losses, sizes = [], []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        losses.append(backward(network, step))
        size = torch.nn.utils.clip_grad_norm_(network.parameters(), torch.inf if clip is None else clip)
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
        sizes.append(size.item())
    return losses, sizes, network


def trainer_of(
    model: Model,
    plan: Plan,
    clip: float | None = None,
    streams: Streams | None = None,
    device: torch.device = CPU,
    initial: bool = False,
    rate: Callable[[int], float] = lr,
    text: TokenFile | None = None,
    disk_path: Path | None = None,
) -> Trainer:
    """Return a trainer of the same model, or with the initial weights of a run; all memory starts as NaN.

    Given a text, its documents are packed.
    """
    batches = ChunkedBatches(model, plan, SEED, text, pack=text is not None, device=device)
    host_slots = simulate(model, plan, NOMINAL_CPU).host_slots
    settings = TrainerSettings(seed=SEED, clip=clip, host_slots=host_slots, disk_path=disk_path and str(disk_path))
    trainer = Trainer(model, plan, device, settings, batches, rate, streams=streams)
    trainer.arena.slab.fill_(255)
    for kind, count in trainer.arena.host_slots.items():
        for number in range(count):
            trainer.arena.host_slot(kind, number).fill_(255)
    if initial:
        trainer.initialise()
    else:
        set_weights(trainer, network_of(model))
    return trainer


def set_weights(trainer: Trainer, network: Network) -> None:
    """Copy the network's weights to the trainer."""
    named = dict(network.named_parameters())
    for bucket in trainer.buckets:
        with trainer.edit_weights(bucket) as weights:
            tensors = bucket_tensors(weights, ParamBuckets(trainer.model).tensors(bucket))
            for place in param_slices(trainer.model, bucket):
                tensors[place.tensor][place.rows].copy_(named[place.name].detach()[place.source])


def weights_in(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the trainer's weights by name."""
    weights = {name: torch.full(p.shape, torch.nan) for name, p in build_model(trainer.model).named_parameters()}
    for bucket in trainer.buckets:
        tensors = bucket_tensors(trainer.weights_of(bucket), ParamBuckets(trainer.model).tensors(bucket))
        for place in param_slices(trainer.model, bucket):
            weights[place.name][place.source] = tensors[place.tensor][place.rows].float().cpu()
    return weights


def trained(trainer: Trainer, steps: int, first: int = 1) -> tuple[list[float], list[float]]:
    """Train and return losses and gradient norms of each step; all updates are applied."""
    issued = [trainer.step(step, "step" if step < steps else "flush") for step in range(first, steps + 1)]
    trainer.flush_updates("nothing")
    return [step.loss for step in issued], [step.grad_norm for step in issued]


def assert_trains_as_reference(
    model: Model,
    plan: Plan,
    steps: int,
    clip: float | None = None,
    streams: Streams | None = None,
    device: torch.device = CPU,
) -> None:
    """Train out of core and in memory, and compare losses, gradient norms and weights."""
    trainer = trainer_of(model, plan, clip, streams, device)
    assert_trains_as(trainer, steps, train_reference(model, plan, steps, clip))


def assert_trains_as(trainer: Trainer, steps: int, reference: tuple[list[float], list[float], Network]) -> None:
    """Train, and compare losses, gradient norms and weights with those of a reference."""
    losses, norms, network = reference
    loss_rel, norm_rel, rtol, atol = TOLERANCE[trainer.arena.slab.device.type]
    actual_losses, actual_norms = trained(trainer, steps)
    assert actual_losses == pytest.approx(losses, rel=loss_rel)
    assert actual_norms == pytest.approx(norms, rel=norm_rel)
    weights = weights_in(trainer)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=rtol, atol=atol, msg=lambda m, n=name: n + m)
