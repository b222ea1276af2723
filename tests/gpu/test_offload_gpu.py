"""Out-of-core training on a GPU: as in memory, within its budgets, on streams that nothing synchronizes."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU, no_synchronization
from outofcore_cases import OUTOFCORE_CASES
from recipe_models import recipe_model
from reference_training import (
    LEAST,
    SEED,
    SMOOTH,
    UNTIED,
    assert_trains_as_reference,
    has_plain_layers,
    least_plan,
    lr,
    trained,
    trainer_of,
    weights_in,
)
from training_run import run_config

from llmb.config.model import Model, MoEConfig
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.offload_plan import UPDATES, Plan, PlanConstraints
from llmb.config.serialization import to_plain
from llmb.config.spec import OutOfCore, Profile
from llmb.events import RunEnded, StepDone, read
from llmb.models.architectures import Network, build_model
from llmb.offload.cuda_streams import EVENTS, CudaStreams
from llmb.offload.pinned_memory import HostSlab
from llmb.offload.trainer import Trainer
from llmb.perfmodel.hardware import GIB
from llmb.perfmodel.offload.buffers import ParamBuckets
from llmb.perfmodel.offload.machine_rates import H200
from llmb.perfmodel.offload.plan_search import best_plan
from llmb.perfmodel.offload.stream_timeline import read_timeline
from llmb.runtime.synthetic_tokens import synthetic_tokens

pytestmark = NEEDS_GPU

ONE_B = recipe_model("outofcore_llama3", "1b")
# Of the width of Qwen3-1.7B, with fewer layers.
QWEN3 = Model(
    name="qwen3", architecture="qwen3", layers=8, hidden=2048, ffn=6144, heads=16, kv_heads=8, head_dim=128,
    vocab=151936, qk_norm="head", tied_embeddings=True, norm_eps=1e-6,
)  # fmt: skip
MIXTURE = replace(
    QWEN3, name="mixture", architecture="qwen3_moe", layers=4, tied_embeddings=False, vocab=32000,
    experts=MoEConfig(count=32, top_k=4, ffn=768),
)  # fmt: skip
# Of the width of Gemma 2 2B, with fewer layers and a window shorter than the sequences here.
GEMMA2 = Model(
    name="gemma2", architecture="gemma2", layers=4, hidden=2304, ffn=9216, heads=8, kv_heads=4, head_dim=256,
    vocab=32000, activation="gelu", post_norms=True, tied_embeddings=True, norm_eps=1e-6, embedding_scale=48.0,
    attn_logit_softcap=50.0, logit_softcap=30.0, attention_pattern="SF", window=700,
)  # fmt: skip
PLANS = {
    "everything moves": replace(LEAST, chunk_tokens=4, levels="FAIAIFIFA"),
    "several groups per round": replace(LEAST, update_at="forward", gbs=5, groups_per_round=2, levels="FAIIAF"),
    "several sequences per chunk": replace(LEAST, gbs=5, seqs_per_group=2, chunk_tokens=20, levels="FAI"),
}
CASES = [model for model in OUTOFCORE_CASES if not has_plain_layers(model)]


@pytest.fixture
def smooth_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger epsilon of Adam, so that weights can be compared as closely as gradients."""
    monkeypatch.setattr("llmb.offload.task_compute.EPS", SMOOTH)


def streaming_plan(model: Model, dtype: str = "bf16", update: str = "stochastic") -> Plan:
    """Return two groups of three chunks, the last one short; half of everything is offloaded, at all save levels."""
    shards = ParamBuckets(model).vocab_shards
    plan = Plan(
        dtype=dtype, seqlen=1280, gbs=2, chunk_tokens=512, seqs_per_group=1, groups_per_round=2, loss_tokens=256,
        update=update, update_at="forward", resident_params=2, resident_grads=1, resident_states=1,
        param_blocks=shards + 1, grad_blocks=shards + 1, state_blocks=2, inp_slots=8, kv_slots=4, attn_slots=6,
        rest_slots=0, levels="AIA" * 2 * model.layers,
    )  # fmt: skip
    if has_llama_layers(model):
        plan = replace(plan, rest_slots=4, levels="FAI" * 2 * model.layers)
    if model is ONE_B:
        plan = replace(plan, resident_params=8, resident_grads=4, resident_states=4)
    return plan


def network_of(trainer: Trainer, dtype: torch.dtype) -> Network:
    """Return a network with the weights of a trainer."""
    trainer.streams.wait()
    network = build_model(trainer.model).to(GPU, dtype)
    with torch.no_grad():
        for name, weight in weights_in(trainer).items():
            network.get_parameter(name).copy_(weight)
    return network


@pytest.mark.usefixtures("smooth_updates")
@pytest.mark.parametrize("plan", PLANS)
def test_plans_train_as_on_cpu(plan: str) -> None:
    assert_trains_as_reference(UNTIED, PLANS[plan], steps=4, device=GPU)


@pytest.mark.usefixtures("smooth_updates")
@pytest.mark.parametrize("model", CASES, ids=lambda model: f"{model.architecture}-{model.name}")
def test_small_models_train_as_on_cpu(model: Model) -> None:
    assert_trains_as_reference(model, least_plan(model), steps=2, device=GPU)


@pytest.mark.usefixtures("smooth_updates")
def test_1b_trains_as_under_autograd() -> None:
    """Compare losses, norms and all weights in fp32, from the initial weights of a run."""
    trainer = trainer_of(ONE_B, streaming_plan(ONE_B, "fp32", "master"), clip=1.0, device=GPU, initial=True)
    network = network_of(trainer, torch.float32)
    matrices, vectors = ([p for p in network.parameters() if (p.ndim > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=SMOOTH, fused=True)
    actual_losses, actual_norms = trained(trainer, 2)
    for step in (1, 2):
        tokens = synthetic_tokens(SEED, (step - 1) * 2, (2, 1281), ONE_B.vocab, GPU)
        loss = network(tokens[:, :-1], tokens[:, 1:])
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = lr(step)
        adamw.step()
        assert actual_losses[step - 1] == pytest.approx(loss.item(), rel=2e-5)
        assert actual_norms[step - 1] == pytest.approx(norm.item(), rel=2e-4)
    for name, weight in weights_in(trainer).items():
        difference = (weight - network.get_parameter(name).detach().cpu()).abs()
        assert difference.max() < 1e-4, name
        assert difference.mean() < 1e-6, name


@pytest.mark.parametrize("model", [QWEN3, MIXTURE, GEMMA2], ids=lambda model: model.name)
def test_first_loss_and_gradient_norm_are_those_in_memory(model: Model) -> None:
    """In bf16 with the same weights; attention in chunks, and the sums of gradients, round differently."""
    trainer = trainer_of(model, streaming_plan(model), device=GPU, initial=True)
    network = network_of(trainer, torch.bfloat16)
    (loss,), (norm,) = trained(trainer, 1)
    tokens = synthetic_tokens(SEED, 0, (2, 1281), model.vocab, GPU)
    expected = network(tokens[:, :-1], tokens[:, 1:])
    expected.backward()
    expected_norm = torch.nn.utils.get_total_norm([parameter.grad.float() for parameter in network.parameters()])
    assert loss == pytest.approx(expected.item(), rel=2e-3)
    assert norm == pytest.approx(expected_norm.item(), rel=2e-2)


@cache
def losses_of(model: Model, dtype: str, update: str, clip: float | None = None) -> list[float]:
    """Return the losses of three steps, at a learning rate at which no model amplifies rounding."""
    torch.cuda.empty_cache()
    plan = streaming_plan(model, dtype, update)
    return trained(trainer_of(model, plan, clip, device=GPU, initial=True, rate=lambda _: 1e-4), 3)[0]


@pytest.mark.parametrize("plan", ["everything moves", "several groups per round"])
def test_buckets_on_disk_change_no_bit(plan: str, tmp_path: Path) -> None:
    usual = trainer_of(UNTIED, PLANS[plan], device=GPU)
    trainer = trainer_of(UNTIED, replace(PLANS[plan], disk_params=7, disk_states=7), device=GPU, disk_path=tmp_path)
    assert trained(trainer, 4) == trained(usual, 4)
    expected = weights_in(usual)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_in(trainer).items())


@pytest.mark.parametrize("update", UPDATES)
def test_bf16_of_1b_follows_fp32(update: str) -> None:
    fp32 = losses_of(ONE_B, "fp32", "master", clip=1.0)
    assert losses_of(ONE_B, "bf16", update, clip=1.0) == pytest.approx(fp32, rel=0.02)


def test_fp8_of_qwen3_follows_bf16() -> None:
    fp8, bf16 = (losses_of(QWEN3, dtype, "stochastic") for dtype in ("fp8", "bf16"))
    assert fp8 == pytest.approx(bf16, rel=0.02)


@pytest.mark.parametrize("model", [ONE_B, QWEN3, MIXTURE, GEMMA2], ids=lambda model: model.name)
def test_steps_never_synchronize(model: Model) -> None:
    trainer = trainer_of(model, streaming_plan(model), device=GPU, initial=True)
    trainer.step(1)  # compiles kernels and allocates pinned memory
    trainer.streams.wait()
    with no_synchronization():
        issued = [trainer.step(step) for step in (2, 3)]
    trainer.streams.wait()
    assert all(torch.isfinite(output.stats).all() for output in issued)


def test_streams_keep_their_order_over_more_entries_than_events() -> None:
    """Each stream increments a counter in turn: wrong as soon as one does not wait."""
    streams, counter = CudaStreams(GPU), torch.zeros((), dtype=torch.int64, device=GPU)
    seen = torch.empty(EVENTS + 50, 3, dtype=torch.int64, device=GPU)
    streams.begin()
    for number in range(len(seen)):
        streams.enter("inbound", lambda: counter.add_(1), {"outbound": number - 1})
        streams.enter("compute", lambda n=number: (seen[n, 0].copy_(counter), counter.add_(1)), {"inbound": number})
        streams.enter("outbound", lambda n=number: (seen[n, 1].copy_(counter), counter.add_(1)), {"compute": number})
    streams.wait()
    rounds = torch.arange(len(seen), device=GPU) * 3
    assert torch.equal(seen[:, 0], rounds + 1)
    assert torch.equal(seen[:, 1], rounds + 2)


def test_host_slab_is_pinned() -> None:
    slab = HostSlab(1 << 28, GPU)
    assert slab.memory.is_pinned()
    assert slab.memory[12345].is_pinned()


@pytest.mark.exclusive  # the host and device budgets, and overlap in time
@pytest.mark.parametrize(
    ("model", "host_gib", "device_gib"),
    [(ONE_B, 16.0, 10.0), (QWEN3, 12.0, 8.0), (MIXTURE, 12.0, 8.0), (GEMMA2, 12.0, 8.0)],
    ids=["1b", "qwen3", "mixture", "gemma2"],
)
def test_run_keeps_its_budgets_and_overlaps_its_streams(
    model: Model, host_gib: float, device_gib: float, tmp_path: Path
) -> None:
    budgets = {"seqlen": 8192, "host_gib": host_gib, "device_gib": device_gib, "gbs": 8}
    result = best_plan(model, PlanConstraints(dtype="bf16", update="stochastic", **budgets), H200)
    work = OutOfCore(**budgets, steps=4, window=(3, 4), plan=result.plan, lr=1e-5)
    profile = Profile(profile=model is ONE_B, profile_start=3, profile_stop=4)
    config = replace(run_config(model, "bf16", work), profile=profile)
    (tmp_path / "config.json").write_text(json.dumps(to_plain(config)))
    # In a process of its own: what earlier tests leave in the allocator would count towards the budget.
    command = [sys.executable, "-m", "llmb.offload", str(tmp_path / "config.json")]
    assert subprocess.run(command, check=False).returncode == 0
    *events, ended = read(tmp_path / "events.rank0.jsonl")
    assert isinstance(ended, RunEnded)
    assert ended.status == "ok"
    steps = [event for event in events if isinstance(event, StepDone)]
    assert len(steps) == 4
    assert all(event.memory_bytes <= device_gib * GIB for event in steps)
    assert steps[-1].loss < steps[0].loss
    if model is ONE_B:
        streams = read_timeline(tmp_path / "profile" / "lanes.json")
        busy = {
            stream: sum(event.end - event.start for event in streams.events if event.stream == stream)
            for stream in ("compute", "inbound")
        }
        wall = max(s.end for s in streams.events) - min(s.start for s in streams.events)
        assert wall < busy["compute"] + busy["inbound"]
